"""One suite for every backend: each rule that a backend can show, asked of all of them in the same words.

The numpy reference's answer is right by tests/core; the others are held to it: bit for bit where data only moves, in float64 to
rounding where numbers are computed.
"""

import os
from dataclasses import replace

import numpy as np
import pytest

from crossframe.api import Api
from crossframe.layout import FlatLayout, PerParamLayout, RaggedLayout
from crossframe.mesh import MeshSpec
from crossframe.precision import PrecisionPolicy
from crossframe.strategy import Strategy
from tests.across.helpers.contract import LR, MOMENTUM, STEPS, Question, on_jax, on_numpy, on_torch
from tests.conftest import EXHAUSTIVE


def flat(specs, question):
    return FlatLayout(specs, question.mesh.shard, True, question.policy.param_dtype)


def per_param(specs, question):
    return PerParamLayout(specs, question.mesh.shard)


def ragged(specs, question):
    return RaggedLayout(specs, question.mesh.shard)


# What runs, in which layout, by whose division.
BACKENDS = {
    "numpy flat": (on_numpy, flat, Api.FSDP1),
    "numpy per_param": (on_numpy, per_param, Api.FSDP2),
    "torch fsdp1": (on_torch("fsdp1", "flat"), flat, Api.FSDP1),
    "torch per_param": (on_torch("fsdp2", "per_param"), per_param, Api.FSDP2),
    "torch flat": (on_torch("fsdp2", "flat"), flat, Api.FSDP2),
    "torch ragged": (on_torch("fsdp2", "ragged"), ragged, Api.FSDP2),
    "jax shard_map flat": (on_jax("shard_map", "flat"), flat, Api.FSDP1),
    "jax shard_map per_param": (on_jax("shard_map", "per_param"), per_param, Api.FSDP2),
    "jax jit flat": (on_jax("jit", "flat"), flat, Api.FSDP1),
    "jax jit ragged": (on_jax("jit", "ragged"), ragged, Api.FSDP2),
}
HYBRID = MeshSpec(shard=2, replicate=2)
QUESTIONS = {
    "R04 R07 R14 R26 three ranks": Question(MeshSpec(3)),
    "R13 R14 nothing is freed": Question(MeshSpec(3), Strategy.SHARD_GRAD_OP, reshards=False),
    "R10 R15 R28 replicas, accumulation": Question(HYBRID, Strategy.HYBRID_SHARD, microbatches=3),
    "R30 clipping": Question(MeshSpec(3), clip=0.01),
    "R27 a divide factor": Question(MeshSpec(3), divide_factor=2.0),
    "R33 precision": Question(MeshSpec(2), dtype="float32", policy=PrecisionPolicy("bfloat16", reduce_dtype="float32")),
    "R20 each ranks edits": Question(MeshSpec(3), edits="kept"),
    "R20 edits without writeback": Question(MeshSpec(3), edits="lost"),
}
CANNOT = {
    ("torch fsdp1", "R27 a divide factor"): "FSDP1 has no such setting, in torch as here",
    **{
        (
            f"torch {layout}",
            question,
        ): "fully_shard summons by unshard and reshard, which write nothing back of flat memory"
        for layout in ("per_param", "flat", "ragged")
        for question in QUESTIONS
        if "edits" in question
    },
}


# What runs by default. One engine runs all layouts of FSDP2: each question is asked of one of them, by turns. JAX compiles
# programs for each question, which takes seconds: each backend in JAX gets one question, and tests of the JAX backend ask both
# modes for the rest.
IN_TORCH = {question: f"torch {('per_param', 'flat', 'ragged')[i % 3]}" for i, question in enumerate(QUESTIONS)}
IN_JAX = {
    "R13 R14 nothing is freed": "jax jit ragged",
    "R10 R15 R28 replicas, accumulation": "jax shard_map flat",
    "R33 precision": "jax shard_map per_param",
    "R20 each ranks edits": "jax jit flat",
}
PAIRS = [
    (backend, question)
    for backend in BACKENDS
    for question in QUESTIONS
    if os.environ.get(EXHAUSTIVE)
    or backend.startswith(("numpy", "torch fsdp1"))
    or backend in (IN_TORCH[question], IN_JAX.get(question))
]


@pytest.mark.parametrize(("backend", "question"), PAIRS)
def test_the_contract(ranks, backend, question):
    if reason := CANNOT.get((backend, question)):
        pytest.skip(reason)
    run, make, api = BACKENDS[backend]
    asked = QUESTIONS[question]
    answer, right = run(asked, make, api, ranks), on_numpy(asked, make, api)
    size = asked.mesh.world_size
    for rank in range(size):
        held, wanted = answer.before[rank], right.before[rank]
        assert held.keys() == wanted.keys(), rank
        for name, value in wanted.items():
            np.testing.assert_array_equal(held[name], value, err_msg=f"{name} of rank {rank}")
    tolerance = _tolerance(asked)
    np.testing.assert_allclose(answer.losses, right.losses, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(answer.norms, right.norms, rtol=tolerance)
    for rank in range(size):
        assert answer.after[rank].keys() == right.after[rank].keys()
        for name, value in right.after[rank].items():
            np.testing.assert_allclose(answer.after[rank][name], value, rtol=0, atol=tolerance, err_msg=name)


def _tolerance(question: Question) -> float:
    """Losses, gradients and parameters here are of order 1. A gradient goes through four layers of at most 5 products, sums over
    4 samples, 3 microbatches and 4 ranks, some 100 roundings, and lr * (1 + momentum) a step of it reaches a parameter; bfloat16
    rounds at 2 ** -8, and so the compute of backends may differ by a few of its units."""
    if question.policy.param_dtype == "bfloat16":
        return 16 * 2.0**-8 * LR * (1 + MOMENTUM) * STEPS
    return 1e-13


def test_questions_tell_apart_what_they_ask_of():
    """Each question's answer differs from that of the plain one, so that who ignores it is found out."""
    plain = Question(MeshSpec(3))
    ask = lambda question: on_numpy(question, flat, Api.FSDP1)  # noqa: E731
    before = ask(plain).after[0]
    for changes in ({"clip": 0.01}, {"divide_factor": 2.0}, {"microbatches": 3}, {"edits": "kept"}):
        after = ask(replace(plain, **changes)).after[0]
        assert max(np.abs(after[name] - value).max() for name, value in before.items()) > 1e-3, changes
