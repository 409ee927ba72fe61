"""Files of users that cannot be loaded: one line."""

import json

import pytest
from small_recipe import qbench

from qbench.errors import RecipeError
from qbench.recipe import Recipe

pytestmark = pytest.mark.usefixtures("own_cache")


NAMED = "from qbench.quantizers import METHODS, register\nregister("
OF = "(METHODS.get('bnb-8bit').settings)"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("import nothing_of_this_name\n", r"line 1: ModuleNotFoundError: No module named"),
        ("x = 1\ny = 1 / 0\n", r"line 2: ZeroDivisionError: division by zero"),
        ("def\n", r"line 1: SyntaxError"),
        ("raise BaseException('no')\n", "line 1: BaseException: no"),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit: 3"),
        (f"{NAMED}'../x', 'a line'){OF}\n", r"'\.\./x': a name is letters"),
        (f"{NAMED}'a\\nb', 'a line'){OF}\n", "a name is letters"),
        (f"{NAMED}5, 'a line'){OF}\n", "quantizer 5: a name is letters"),
        (f"{NAMED}None, 'a line'){OF}\n", "quantizer None: a name is letters"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_does_not_load_is_one_line(tmp_path, content, said):
    path = tmp_path / "broken.py"
    if content is not None:
        path.write_text(content)
    with pytest.raises(RecipeError, match=said):
        qbench("list", "quantizers", "--plugin", path)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("nosuch.py", r"recipe\.yaml:1: plugins\[0\] '\S+nosuch\.py': cannot be read"),
        ({"path": "a.py"}, r"recipe\.yaml:1: plugins\.path was removed: write the path alone"),
    ],
)
def test_plugins_of_a_recipe_that_cannot_be_are_one_line(tmp_path, entry, said):

    (tmp_path / "a.py").write_text("x = 1\n")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"plugins: [{json.dumps(entry)}]\nname: x\ncheckpoints: {{a: b/c}}\nquantizers: [bf16]\n"
        "tasks: [sciq]\n"
    )
    with pytest.raises(RecipeError, match=said) as error:
        Recipe.load(path)
    assert len(str(error.value).splitlines()) == 1
