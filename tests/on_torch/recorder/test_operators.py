"""Operators traced in torch: where two versions of a small script part, and at which line."""

import runpy
import shlex

import pytest
import torch

from crossframe.cli.explain import explain
from crossframe.operators import TRACE, Request, Trace, find
from crossframe.operators.request import TRACE_NAME
from crossframe.recording.event_format import BACKWARD, FORWARD, UPDATE
from crossframe.recording.known_settings import COMMAND
from crossframe.verdict.measure.bounds_by_dtype import bounds_for
from torch_backend.recorder import script
from torch_backend.recorder._float64_check import exact_of
from torch_backend.recorder._operator_trace import OperatorTrace

SCRIPT = """
import math, torch
from torch import nn
from torch.nn import functional as F
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, grad):
        return grad * 1.0
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (each.view(b, t, 2, 4).transpose(1, 2) for each in self.qkv(x).split(8, -1))
        scores = q @ k.transpose(-2, -1)
        scores = scores / math.sqrt(4)
        mask = torch.ones(t, t, dtype=torch.bool).tril()
        p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        y = p @ v
        y = y.transpose(1, 2).reshape(b, t, d)
        return self.out(y)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position, self.attention = nn.Embedding(11, 8), nn.Embedding(9, 8), Attention()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 11)
    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-5)
        x = Twice.apply(x + self.attention(x))
        h = F.gelu(self.up(x))
        return self.down(h)
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
def loss_of():
    tokens = torch.randint(11, (4, 7), generator=torch.Generator().manual_seed(1))
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
"""
LOOP = """
for _ in range(2):
    loss_of().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def line_of(text):
    assert SCRIPT.count(text) == 1, text
    return SCRIPT[: SCRIPT.index(text)].count("\n") + 1


def traced(path, phase=FORWARD, *, text=SCRIPT, in_bits=True):
    path.write_text(text)
    made = runpy.run_path(str(path))
    with OperatorTrace(made["model"], Request("", 0, 0, phase, "", in_bits=in_bits, judged=phase == FORWARD)) as trace:
        trace.begin_step(active=True)
        loss = made["loss_of"]()
        trace.result(loss)
        loss.backward()
        made["optimizer"].step()
    return trace.trace()


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """The trace of the script as it is, by phase."""
    path = tmp_path_factory.mktemp("unchanged") / "a.py"
    return {phase: traced(path, phase) for phase in (FORWARD, BACKWARD, UPDATE)}


@pytest.fixture
def found(tmp_path, unchanged):
    def compare(old, new, phase=FORWARD, *, tolerance=None):
        assert SCRIPT.count(old) == 1, old
        other = traced(tmp_path / "b.py", phase, text=SCRIPT.replace(old, new), in_bits=tolerance is None)
        same = unchanged[phase] if tolerance is None else traced(tmp_path / "a.py", phase, in_bits=False)
        return find(same, other, tolerance)

    return compare


@pytest.mark.parametrize(
    ("old", "new", "operator", "phase"),
    [
        pytest.param("variance + 1e-5", "variance + 1e-6", "aten.add", FORWARD, id="epsilon"),
        pytest.param("F.gelu(self.up(x))", "F.gelu(self.up(x), approximate='tanh')", "aten.gelu", FORWARD, id="tanh"),
        pytest.param("math.sqrt(4)", "math.sqrt(8)", "aten.div", FORWARD, id="scale"),
        pytest.param("p @ v", "p.bfloat16().float() @ v", "aten._to_copy", FORWARD, id="cast"),
        pytest.param(".tril()", ".tril(1)", "aten.tril", FORWARD, id="mask"),
        pytest.param("y.transpose(1, 2).reshape(b", "y.reshape(b", "aten.view", FORWARD, id="transpose"),
        pytest.param("x.pow(2).mean", "x.pow(2).half().mean", "aten._to_copy", FORWARD, id="half sum"),
        pytest.param("torch.arange(", "1 + torch.arange(", "aten.add", FORWARD, id="index"),
        pytest.param(
            "tokens[:, 1:].flatten())", "tokens[:, 1:].flatten(), label_smoothing=0.1)", "aten.sum", FORWARD, id="loss"
        ),
        pytest.param("grad * 1.0", "grad * 1.01", "aten.mul", BACKWARD, id="backward"),
        pytest.param("parameters(), 1e-2", "parameters(), 1e-2, eps=1e-6", "", UPDATE, id="optimizer"),
    ],
)
def test_one_changed_operator_is_found_at_its_line(found, old, new, operator, phase):
    first = found(old, new, phase)
    assert first.b is not None and operator in first.b.name
    if phase != UPDATE:  # lines of torch's own optimizers are none of the script's
        assert first.b.line.number == line_of(old)
        assert first.b.line.code == SCRIPT.replace(old, new).splitlines()[line_of(old) - 1].strip()


def test_constants_and_factors_are_printed(found):
    first = found("math.sqrt(4)", "math.sqrt(16)")
    assert (first.a.arguments, first.b.arguments, first.factor) == ("other=2.0", "other=4.0", pytest.approx(0.5))
    assert first.a.judged.inside and first.b.judged.inside


def test_the_same_script_has_nothing_that_parts(found):
    for phase in (BACKWARD, UPDATE):
        first = found("math.sqrt(4)", "math.sqrt(4)", phase)
        assert (first.a, first.b) == (None, None) and first.num_matched == first.num_operators


EAGER = SCRIPT[SCRIPT.index("        scores = q @ k") : SCRIPT.index("        y = y.transpose")]


def test_fused_attention_matches_eager_attention(found):
    tolerance = bounds_for("float32").parameter
    fused = EAGER.split("\n")[0].replace("q @ k.transpose(-2, -1)", "None") + "\n"
    fused += "        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)\n"
    alike = found(EAGER, fused, tolerance=tolerance)
    assert (alike.a, alike.b) == (None, None)
    first = found(EAGER, fused.replace("is_causal=True", "is_causal=True, scale=0.25"), tolerance=tolerance)
    assert first.a is not None and first.b is not None and first.a.line is not None and first.b.line is not None
    assert "attention" in first.b.name and "scale=0.25" in first.b.line.code
    assert first.a.line.number == line_of("scores = scores / math.sqrt(4)")


def test_backward_operators_have_their_forward_line(unchanged):
    operators = unchanged[BACKWARD].operators
    lines = {op.name: op.line.number for op in operators if op.phase == BACKWARD and op.line is not None}
    assert lines["aten.gelu_backward"] == line_of("F.gelu(self.up(x))")
    assert lines["aten._softmax_backward_data"] == line_of("softmax(-1)")


def test_an_inexact_operator_is_outside_its_bound():
    class Wrong(torch.nn.Module):
        def forward(self, x):
            return torch.ops.crossframe_test.wrong_sum(x)

    @torch.library.custom_op("crossframe_test::wrong_sum", mutates_args=())
    def wrong_sum(x: torch.Tensor) -> torch.Tensor:
        return x.half().sum(-1).float() if x.dtype == torch.float32 else x.sum(-1)

    with OperatorTrace(model := Wrong(), Request("", 0, 0, FORWARD, "", judged=True)) as trace:
        trace.begin_step(active=True)
        model(100 * torch.rand(4, 4096, generator=torch.Generator().manual_seed(0)))
    (judged,) = (op.judged for op in trace.trace().operators if "wrong_sum" in op.name)
    assert judged is not None and not judged.inside


def in_format(x, bits):
    """x truncated to `bits` bits of its significand."""
    return (x.view(torch.int32) & (-1 << (24 - bits))).view(torch.float32)


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize(
    ("precision", "function", "inside"),
    [
        ("highest", torch.mm, (24,)),
        ("high", torch.mm, (24, 11)),
        ("medium", torch.mm, (24, 11, 8)),
        ("medium", torch.conv2d, (24,)),
    ],
)
def test_the_bound_of_a_product_follows_its_precision(precision, function, inside, positive):
    """Factors truncated to TF32 (11 bits) and to bfloat16 (8 bits), in sums of 512 products."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 512), (512, 8)) if function is torch.mm else ((1, 32, 4, 4), (8, 32, 4, 4))
    x, w = (torch.randn(shape, generator=generator) for shape in shapes)
    x, w = (x.abs(), w.abs()) if positive else (x, w)
    before = torch.get_float32_matmul_precision()
    computed = {bits: function(in_format(x, bits), in_format(w, bits)) for bits in (24, 11, 8)}
    try:
        torch.set_float32_matmul_precision(precision)
        exact = exact_of(function, (x, w), {})
    finally:
        torch.set_float32_matmul_precision(before)
    for bits, result in computed.items():
        judged = exact.judge(result)
        assert judged.inside == (bits in inside), (bits, judged)


def test_exact_results_leave_devices_of_no_tensor_alone(monkeypatch):
    """A generator that is read initialises its device."""

    def get_rng_state(device):
        raise RuntimeError(f"device {device} is initialised")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", get_rng_state)
    assert exact_of(torch.matmul, (torch.ones(2, 2), torch.ones(2, 2)), {}) is not None


def test_storage_can_be_freed_after_its_values_were_noted():
    values = torch.ones(3, dtype=torch.float64)
    with OperatorTrace(torch.nn.Identity(), Request("", 0, 0, FORWARD, "")) as trace:
        trace.begin_step(active=True)
        values + 1
    values.untyped_storage().resize_(0)


def test_a_recorder_traces_the_step_that_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "s.py").write_text(SCRIPT + LOOP)
    for name, value in Request(str(tmp_path), 1, 0, FORWARD, "attention").to_environment().items():
        monkeypatch.setenv(name, value)
    assert script.run([str(tmp_path / "s.py")], str(tmp_path / "run")) == 0
    operators = Trace.read(tmp_path / TRACE_NAME).operators
    assert operators and {op.module.split(".")[0] for op in operators} == {"attention"}
    assert not (tmp_path / "run").exists()


def test_explain_makes_both_runs_again(forks, tmp_path, capsys, monkeypatch):
    from rich.console import Console

    monkeypatch.delenv(TRACE, raising=False)
    for name, scale in (("a", "math.sqrt(4)"), ("b", "math.sqrt(8)")):
        path = tmp_path / f"{name}.py"
        path.write_text((SCRIPT + LOOP).replace("math.sqrt(4)", scale))
        settings = {COMMAND: shlex.join(["crossframe", "record", str(path)])}
        assert script.run([str(path)], str(tmp_path / name), settings=settings) == 0
    status = explain(
        (tmp_path / "a", tmp_path / "b"),
        folder=None,
        timeout=300,
        param_map=None,
        svg=tmp_path / "operators.svg",
        as_json=False,
        console=Console(width=200),
    )
    said = capsys.readouterr().out
    assert status == 1
    assert f"b.py:{line_of('math.sqrt(4)')}: scores = scores / math.sqrt(8)" in said
    assert "the output in b is 0.707107 times that in a" in said
    assert "b.py:" in (tmp_path / "operators.svg").read_text()


COMPILED = """
import sys, torch
from torch import nn
from torch.nn import functional as F
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        h = F.gelu(self.up(x))
        return x + torch.tanh(self.down(h))
class Tanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(y := x.tanh())
        return y
    @staticmethod
    def backward(ctx, grad):
        return 1.01 * grad * (1 - ctx.saved_tensors[0] ** 2)
def backend(graph, inputs):
    for node in graph.graph.nodes:
        values_are_returned = len(graph.graph.find_nodes(op="placeholder")) > 5
        if (FAULT == "operator" or (FAULT == "values" and values_are_returned)) and node.target is F.gelu:
            node.kwargs = {"approximate": "tanh"}
        if FAULT == "pattern" and any(user.target is torch.rsqrt for user in node.users):
            node.args = (node.args[0], 1e-4)
        if FAULT == "backward" and node.target is torch.tanh:
            node.target = lambda x: Tanh.apply(x)
    graph.recompile()
    return graph.forward
FAULT = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(torch.compile(Block(), backend=backend), Block())
optimizer = torch.optim.SGD(model.parameters(), 1e-2)
if __name__ == "__main__":
    for _ in range(2):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def compiled_trace(path, fault, monkeypatch):
    path.write_text(COMPILED)
    monkeypatch.setattr("sys.argv", [str(path), fault])
    made = runpy.run_path(str(path))
    with OperatorTrace(made["model"], Request("", 0, 0, BACKWARD, "", judged=True, compiled=True)) as trace:
        trace.begin_step(active=True)
        made["model"](torch.randn(4, 8)).square().mean().backward()
    return trace.trace()


@pytest.mark.parametrize(
    ("fault", "line", "phase"),
    [
        pytest.param("operator", "h = F.gelu(self.up(x))", FORWARD, id="operator"),
        pytest.param("pattern", "x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)", FORWARD, id="pattern"),
        pytest.param("backward", "return x + torch.tanh(self.down(h))", BACKWARD, id="backward"),
    ],
)
def test_an_operator_compiled_wrong_is_found_at_its_line(tmp_path, monkeypatch, fault, line, phase):
    first = compiled_trace(tmp_path / "s.py", fault, monkeypatch).outside()[0]
    assert first.line is not None and first.line.code == line
    assert (first.phase, first.module) == (phase, "0")


@pytest.mark.parametrize("fault", ["none", "values"])
def test_operators_compiled_right_are_inside_their_bounds(tmp_path, monkeypatch, fault):
    trace = compiled_trace(tmp_path / "s.py", fault, monkeypatch)
    assert not trace.outside()
    names = {op.name for op in trace.judged()}
    assert {"compiled.graph", "compiled.tanh", "compiled.linear", "aten.gelu"} <= names


def test_compiled_modules_are_judged_in_the_step_asked_for(tmp_path, monkeypatch):
    (tmp_path / "s.py").write_text(COMPILED)
    request = Request(str(tmp_path), 1, 0, BACKWARD, "", judged=True, compiled=True)
    for name, value in request.to_environment().items():
        monkeypatch.setenv(name, value)
    assert script.run([str(tmp_path / "s.py"), "operator"], str(tmp_path / "run")) == 0
    first = Trace.read(tmp_path / TRACE_NAME).outside()[0]
    assert (first.name, first.module) == ("compiled.gelu", "0")
