"""Put the recipes and the demo's checkpoints, tasks and data into the wheel as qbench/bundled."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

RECIPES = Path(__file__).parent / "recipes"
KINDS = {".yaml", ".json", ".jsonl", ".safetensors", ".txt", ".md"}


class BuildWithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # there they lie beside the package
            for file in RECIPES.rglob("*"):
                if file.suffix in KINDS:
                    target = Path(self.build_lib, "qbench/bundled", file.relative_to(RECIPES))
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, target)


setup(cmdclass={"build_py": BuildWithRecipes})
