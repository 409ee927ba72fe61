import pytest
from kernel_scripts import lines_of

LIMIT = 1e-5  # relative, float32 against the float64 reference


@pytest.mark.parametrize(
    ("script", "groups", "count"),
    [
        ("interpreted.py", "features", 53),
        ("interpreted.py", "shaped", 34),
        ("interpreted.py", "model operators refusals", 1 + 3 + 5),
        ("repeated.py", "", 7),
        ("flags_interpreted.py", "", 13),
        ("mended_interpreted.py", "", 12),
        ("slopes_interpreted.py", "", 16),
    ],
)
def test_kernels_in_the_interpreter_equal_the_reference(script, groups, count):
    errors = dict(lines_of(script, *groups.split()))
    assert len(errors) == count
    assert {name: e for name, e in errors.items() if not float(e) <= LIMIT} == {}
