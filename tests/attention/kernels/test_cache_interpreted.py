from kernel_scripts import lines_of


def test_kernels_of_the_cache_in_the_interpreter_equal_their_definitions():
    off = {name: float(e) for name, e in lines_of("cache_interpreted.py")}
    assert len(off) == 5 + 3 + 3 + 10
    limit = {name: 0 if name.startswith("rounding") else 1e-5 for name in off}
    assert {name: e for name, e in off.items() if not e <= limit[name]} == {}
