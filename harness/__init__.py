"""The judge. docs/architecture.md has its folders, processes and messages."""
