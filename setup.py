"""Builds the C part with native/build.py; everything else is in pyproject.toml."""

import importlib.util
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

BUILD = Path(__file__).resolve().parent / "native" / "build.py"


class NinjaBuild(build_ext):
    """One module, made by ninja instead of by setuptools.

    MIDAIR_NATIVE_LATER=1 leaves it out: `make build` makes it in place, incrementally.
    """

    def build_extension(self, ext: Extension) -> None:
        if os.environ.get("MIDAIR_NATIVE_LATER"):
            return
        spec = importlib.util.spec_from_file_location("native_build", BUILD)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)  # not `import native`: that needs what is made here
        out = Path(self.get_ext_fullpath(ext.name)).absolute().parent.parent
        module.build(out, False, False, [], root=Path(self.build_temp).absolute())

    def copy_extensions_to_source(self) -> None:
        if not os.environ.get("MIDAIR_NATIVE_LATER"):
            super().copy_extensions_to_source()


setup(ext_modules=[Extension("native._midair", [])], cmdclass={"build_ext": NinjaBuild})
