"""What `pip install .` does in this checkout. setuptools loads this file by its path, alone."""

from setuptools.command.build_py import build_py


class Editable(build_py):
    """Refuse an installation that copies files: kernels, records and builds are in the checkout."""

    def run(self) -> None:
        if not self.editable_mode:
            raise SystemExit("dsv4-kernel-judge works in its checkout only: pip install -e .")
        super().run()
