"""The judge. docs/architecture.md has its folders, the direction of imports, and the steps of one judged call."""
