"""`python -m harness.sandbox --probe` prints what this machine's sandbox offers, as JSON."""

import json

from harness.sandbox import policy

if __name__ == "__main__":
    print(json.dumps(policy.probe(), indent=2))
