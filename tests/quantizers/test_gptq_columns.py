"""The kernel of GPTQ's columns against the library's loop, in Triton's interpreter."""

from columns_loop import CASES
from interpreted_script import results_of


def test_the_kernel_of_columns_in_the_interpreter_is_the_librarys_loop_to_the_bit():
    wrong = results_of("columns_interpreted.py")
    assert len(wrong) == len(CASES)
    assert {case: places for case, places in wrong.items() if places} == {}
