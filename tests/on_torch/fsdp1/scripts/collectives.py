"""Collectives that a script replaces."""

from tests.on_torch.fsdp1.scripts import scenario
from tests.on_torch.helpers.fsdp1_models import nested
from tests.on_torch.helpers.scripts import counting_collectives, inputs


@scenario("flat")
def collectives_that_are_replaced_by_name(side):
    """PyTorch's own tests replace collectives in torch.distributed, to count them and to look at their arguments."""
    model = nested(side)
    with counting_collectives() as counts:
        model(inputs(side)).sum().backward()
        with model.no_sync():
            model(inputs(side)).sum().backward()
        model(inputs(side)).sum().backward()
    return counts
