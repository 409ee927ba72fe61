from qbench.attention.kernels import modes, tiles

CAPPED = modes.CAPPED.value


def near(*, width=64, family="softmax", softcap=50.0, asked=CAPPED, backward=False):
    """Whether tanh is a polynomial."""
    return bool(
        tiles.arithmetic(width, family, softcap, asked, backward=backward) & modes.NEAR.value
    )


def test_tanh_is_a_polynomial_in_the_forward_pass_of_narrow_heads():
    for family in ("softmax", "softpick", "rectified", "sigmoid"):
        assert near(family=family)
        assert near(family=family, width=32)
        assert not near(family=family, width=128)
        assert not near(family=family, backward=True)


def test_tanh_of_a_narrow_cap_or_of_scores_that_are_scaled_or_sloped_is_no_polynomial():
    assert near(softcap=15.0)
    for softcap in (0.0, 5.0, 14.9, 2e4):
        assert not near(softcap=softcap)
    for other in (modes.SCALED, modes.SLOPED):
        assert not near(asked=CAPPED | other.value)


def test_softpicks_signs_are_asked_for_backward_where_scores_are_only_scaled_or_only_sloped():
    """The comparison has softpick's formula, and is of a product with what makes its score 0."""
    scaled, sloped = modes.SCALED.value, modes.SLOPED.value

    def asked_for(family, asked, *, backward=True):
        bits = tiles.arithmetic(
            64, family, 50.0 if asked & CAPPED else 0.0, asked, backward=backward
        )
        return bits & modes.COMPARED.value != 0

    others = modes.NEXT.value | modes.LEARNING.value | modes.LEARNING_SLOPES.value
    for alone in (scaled, sloped):
        assert asked_for("softpick", alone)
        assert asked_for("softpick", alone | others)
        assert not asked_for("softpick", alone, backward=False)
        assert not asked_for("softpick", alone | CAPPED)
        for family in ("softmax", "rectified", "sigmoid"):
            assert not asked_for(family, alone)
    assert not asked_for("softpick", scaled | sloped)
    assert not asked_for("softpick", 0)
