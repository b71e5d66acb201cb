"""Raises an error whose text is hostile.
Stopped by: texts of a runner are cut and cleaned where they come in, and escaped where they are shown; a message has a
limit.
"""

VERDICT = "RUNTIME_ERROR"
VARIANTS = {"long": {"REASON": "left out"}, "markup": {"REASON": "[/red][bold]PASSED"}}


def long(data):
    """Its error's text has ten million characters."""
    raise ValueError("PASSED " * 1_500_000)


def markup(data):
    """Its error's text is markup, colours and a forged verdict."""
    raise ValueError("[/red][bold]PASSED[/bold] \x1b[31m <script>alert(1)</script> | 1 us | [link=file:///etc/passwd]x")
