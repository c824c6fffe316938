"""Scripts that call their model in transforms of torch.func, recorded."""

from crossframe.recording import Recording

ADAPTED = """
from torch.func import functional_call, grad, vmap
model = net()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def loss_at(params, x):
    return loss_of(lambda tokens: functional_call(model, params, (tokens,)), x)
def adapted(x):
    params = dict(model.named_parameters())
    return {name: param - 0.1 * grads for (name, param), grads in zip(params.items(), grad(loss_at)(params, x).values())}
"""
LOOP = """
for x in tokens:
    optimizer.zero_grad()
    LOSS.backward()
    optimizer.step()
"""


def test_calls_in_transforms_are_no_microbatches(tmp_path, run):
    loss = "vmap(lambda each: loss_at(adapted(each[:1]), each[1:]))(x.unflatten(0, (2, 2))).mean()"
    assert run(ADAPTED + LOOP.replace("LOSS", loss)) == 0
    found = Recording.open(tmp_path / "out")
    assert found.num_steps == 3 and found.has("update", 2, next(iter(found.manifest.params)))
    assert not found.activations(0)
