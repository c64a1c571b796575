"""The expected speed-up, against the formula worked out by hand."""

import pytest

from onboard.checkpoint.headers import Header
from onboard.evals.roofline import draft_bytes, expected_speedup, target_decode
from onboard.gpus import Decode

DENSE = Decode(1000, 0, 0, 0, 0)


def headers(**sizes: int) -> dict[str, Header]:
    """Tensors of so many bytes; `__` in a name is a dot."""
    names = {name.replace("__", "."): size for name, size in sizes.items()}
    return {n: Header(n, "U8", (size,), "model.safetensors", 0, size) for n, size in names.items()}


def test_the_formula_of_leviathan_for_a_dense_target() -> None:
    # alpha = 0.8, gamma = 3: tau = (1 - 0.8^4) / 0.2 = 2.952; c = 50 / 1000.
    assert expected_speedup(2.952, 3, 50, DENSE, 1) == pytest.approx(2.952 / 1.15)
    assert expected_speedup(2.952, 3, 50, DENSE, 64) == pytest.approx(2.952 / 1.15)
    assert expected_speedup(1, 3, 0, DENSE, 1) == 1


def test_verifying_reads_more_experts_than_decoding() -> None:
    # One token reads 1 of 4 experts, 100 + 400 / 4; two read 1 - (3/4)^2 = 7/16 of them.
    sparse = Decode(100, 400, 1, 4, 0)
    assert expected_speedup(1.5, 1, 25, sparse, 1) == pytest.approx(1.5 * 200 / (100 + 175 + 25))
    # Where every expert is read anyway, it is the dense formula again.
    assert expected_speedup(1.5, 1, 25, sparse, 1000) == pytest.approx(1.5 * 500 / 525)


def test_a_draft_reads_no_table() -> None:
    held = headers(
        embed_tokens__weight=900, d2t=70, t2d=30, fc__weight=6, lm_head__weight=20,
        layers__0__mlp__up_proj__weight=4,
    )  # fmt: skip
    assert draft_bytes(held) == 30


def adaptation(experts: object = None, **roles: str) -> dict[str, object]:
    tensors = {name.replace("__", "."): {"role": role} for name, role in roles.items()}
    return {"tensors": tensors, "experts": experts}


def test_a_target_with_a_head_of_its_own() -> None:
    roles = adaptation(
        embed__weight="embed", lm_head__weight="head", layers__0__up__weight="mlp",
        layers__0__A_log="state", mtp__up__weight="mtp", tower__up__weight="vision",
    )  # fmt: skip
    held = headers(
        embed__weight=500, lm_head__weight=300, layers__0__up__weight=40,
        layers__0__up__weight_scale=5, layers__0__up__weight_scale_2=1, layers__0__A_log=2,
        layers__0__k_scale=3, mtp__up__weight=60, tower__up__weight=70,
    )  # fmt: skip
    assert target_decode(held, roles) == Decode(300 + 40 + 5 + 1 + 2 + 3, 0, 0, 0, 0)


def test_a_tied_embedding_is_read_as_the_head() -> None:
    roles = adaptation(embed__weight="embed", up__weight="mlp")
    assert target_decode(headers(embed__weight=500, up__weight=40), roles).dense_bytes == 540


@pytest.mark.parametrize(("per_token", "used"), [(2, 2), (None, 8)])
def test_routed_experts(per_token: int | None, used: int) -> None:
    roles = adaptation(
        {"count": 8, "per_token": per_token},
        layers__0__mlp__experts__gate_up_proj="expert",  # one tensor in the source
        layers__0__mlp__shared_experts__up__weight="shared_expert",
        layers__0__mlp__gate__weight="router",
    )
    held = headers(
        layers__0__mlp__experts__0__gate_proj__weight=10,
        layers__0__mlp__experts__1__up_proj__weight_scale=6,
        layers__0__mlp__shared_experts__up__weight=4,
        layers__0__mlp__gate__weight=1,
    )
    assert target_decode(held, roles) == Decode(5, 16, used, 8, 0)
