"""What the grid's models do not have: parts that a microbatch leaves out, frozen and ignored parameters, awkward meshes, modes.

Each case is one small training in float64, by two ranks and by one device that is fed the same samples. `expected` says what is
known of the cases that part.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from experiments.bench.contestants import OURS, PACKAGES, THEIRS
from torch_backend.recorder import Recorder

WORLD_SIZE, STEPS, SAMPLES, WIDTH = 2, 3, 8, 5


class Block(nn.Module):
    """Two linear layers, added to what comes in, and a scale that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.9))

    def forward(self, x: Tensor, scaled: bool) -> Tensor:
        x = x + self.down(functional.silu(self.up(x)))
        return x * self.scale if scaled else x


class Chain(nn.Module):
    """Blocks, of which each call says which are used, in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, use: Sequence[int], unscaled: Sequence[int], checkpointed: bool) -> Tensor:
        x = self.inp(x)
        for i in use:
            if checkpointed:
                x = checkpoint(self.blocks[i], x, i not in unscaled, use_reentrant=False)  # type: ignore[assignment]
            else:
                x = self.blocks[i](x, i not in unscaled)
        return self.out(x)


ALL = (0, 1, 2)


@dataclass(frozen=True)
class Case:
    """One training, by one contestant.

    Attributes:
        name: what is special.
        api: "DDP", "FSDP1" or "FSDP2".
        ours: whether it is ours.
        microbatches: of each which blocks it uses.
        unscaled: the blocks whose scale no microbatch uses.
        options: of the contestant; `mesh` is a shape.
        frozen, ignored: prefixes of parameters.
        clip: which norm is clipped to a tenth; None: none.
        sync: whether each microbatch is reduced.
        checkpointed: whether blocks are computed again in the backward.
        shares: how many samples each rank gets; None: half each.
        expected: what is known of why it parts or fails; "": nothing, it should agree.
    """

    name: str
    api: str
    ours: bool = False
    microbatches: tuple[tuple[int, ...], ...] = (ALL,)
    unscaled: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    frozen: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    clip: float | None = None
    sync: bool = False
    checkpointed: bool = False
    shares: tuple[int, int] | None = None
    expected: str = ""

    @property
    def contestant(self) -> str:
        """What shards it."""
        return f"{OURS if self.ours else THEIRS} {self.api}"

    @property
    def folder(self) -> str:
        """A name for its directories."""
        words = f"{self.name} {self.contestant}"
        return "".join(each if each.isalnum() else "_" for each in words)


def _cases() -> list[Case]:
    found: list[Case] = []

    def add(name: str, apis: Sequence[str] = ("DDP", "FSDP1", "FSDP2"), **rest: Any) -> None:
        said = rest.pop("expected", {})
        options = rest.pop("options", {})
        for api in apis:
            for ours in (False, True) if api != "DDP" else (False,):
                expected = said.get(api, "") if not ours or api in said.get("ours", ()) else ""
                found.append(
                    Case(name, api, ours, options=options.get(api, {}), **rest, expected=expected)  # type: ignore[arg-type]
                )

    finds = {"DDP": {"find_unused_parameters": True}}
    add("three microbatches", microbatches=(ALL,) * 3)
    add("three microbatches, each reduced", microbatches=(ALL,) * 3, sync=True)
    add("a unit used twice", microbatches=((0, 1, 1, 2),))
    add("units in another order", microbatches=(ALL, (2, 1, 0)), options=finds)
    add("a unit never used", microbatches=((0, 2),), options=finds)
    add("a unit not used in the first microbatch", microbatches=((0, 2), ALL), options=finds)
    add(
        "a unit not used in the last microbatch",
        microbatches=(ALL, (0, 2)),
        options=finds,
        expected={"FSDP1": UNUSED_IN_LAST},
    )
    add(
        "a unit not used in the last microbatch, NO_SHARD",
        ("FSDP1",),
        microbatches=(ALL, (0, 2)),
        options={"FSDP1": {"sharding_strategy": "NO_SHARD"}},
        expected={"FSDP1": UNUSED_IN_LAST},
    )
    add(
        "a parameter never used in a unit that is",
        unscaled=(1,),
        options=finds,
        expected={"FSDP1": DECAYS, "ours": ("FSDP1",)},
    )
    add("frozen parameters and a frozen unit", frozen=("inp.weight", "blocks.1", "blocks.2.up.weight"))
    add("blocks checkpointed", microbatches=(ALL, ALL), checkpointed=True)
    add("NO_SHARD", ("FSDP1",), microbatches=(ALL, ALL), options={"FSDP1": {"sharding_strategy": "NO_SHARD"}})
    add("gradients reduced, kept unsharded", ("FSDP2",), options={"FSDP2": {"reshard_after_forward": False}})
    mesh = {"mesh": (WORLD_SIZE, 1)}
    add(
        "a hybrid mesh of shards of one rank",
        ("FSDP1", "FSDP2"),
        options={"FSDP1": mesh, "FSDP2": mesh},
        expected={"FSDP1": NOT_AVERAGED},
    )
    add("the largest gradient clipped", ("DDP", "FSDP2"), clip=float("inf"))
    add("the sum of sizes clipped", ("DDP", "FSDP2"), clip=1.0)
    add("the norm clipped", clip=2.0, expected={"FSDP1": CLIP_FLOAT64})
    add(
        "ignored parameters",
        ("FSDP1", "FSDP2"),
        ignored=("inp",),
        expected={"FSDP1": IGNORED, "FSDP2": IGNORED, "ours": ("FSDP1", "FSDP2")},
    )
    uneven = dict.fromkeys(("DDP", "FSDP1", "FSDP2"), UNEVEN)
    add("five samples and three", shares=(5, 3), expected=uneven | {"ours": ("FSDP1", "FSDP2")})
    add("gradients are views of buckets", ("DDP",), microbatches=(ALL, ALL), options=_ddp(gradient_as_bucket_view=True))
    add("a static graph", ("DDP",), options=_ddp(static_graph=True))
    add(
        "a static graph, two microbatches",
        ("DDP",),
        microbatches=(ALL, ALL),
        options=_ddp(static_graph=True),
        expected={"DDP": STATIC},
    )
    return found


def _ddp(**options: Any) -> dict[str, dict[str, Any]]:
    return {"DDP": options}


UNUSED_IN_LAST = "torch's: bugs/unused_in_last_microbatch.py"
NOT_AVERAGED = "torch's: bugs/hybrid_of_one.py"
CLIP_FLOAT64 = "torch's: bugs/clip_float64.py"
STATIC = "torch's: bugs/static_graph.py"
DECAYS = "by design of FSDP1, whose gradient of a unit is one, and of ours, which does as it does (R29): bugs/unused_decays.py"
IGNORED = (
    "by design: gradients of ignored parameters are the user's to average, and ranks drift apart where nobody does"
)
UNEVEN = "by definition: a mean over ranks is no mean over samples where ranks have unequal numbers of them"
CASES = tuple(_cases())


def record_cases(rank: int, cases: Sequence[Case], folder: str) -> list[str | None]:
    """Record all cases, by ranks or, in a world of one rank, by one device; for each what went wrong, where something did."""
    said: list[str | None] = []
    for case in cases:
        try:
            _record(case, rank, dist.get_world_size(), Path(folder, case.folder))
            said.append(None)
        except Exception as error:
            said.append(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
        dist.barrier()
    return said


def _record(case: Case, rank: int, world_size: int, path: Path) -> None:
    torch.manual_seed(0)
    module = Chain().double()
    for name, param in module.named_parameters():
        param.requires_grad_(not name.startswith(case.frozen) if case.frozen else True)
    alone = world_size == 1
    model: Any = module if alone else _sharded(case, module)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], 1e-2)
    units = {Block} if alone or case.api == "DDP" else None
    with Recorder(
        path / ("alone" if alone else "ranks"),
        model=model,
        optimizer=optimizer,
        units=units,
        dense=STEPS,
        steps=STEPS,
        overwrite=True,
        name="chain",
    ) as recorder:
        for step in range(STEPS):
            total = 0.0
            for i, use in enumerate(case.microbatches):
                x, y = _samples(case, step, i, rank, world_size)
                with _held_back(model, case.sync or i == len(case.microbatches) - 1):
                    predicted = model(x, use, case.unscaled, case.checkpointed)
                    loss = functional.mse_loss(predicted, y) / len(case.microbatches)
                    loss.backward()
                total += loss.item()
            if case.clip is not None:
                own = getattr(model, "clip_grad_norm_", partial(nn.utils.clip_grad_norm_, model.parameters()))
                own(0.1, norm_type=case.clip)
            optimizer.step()
            recorder.step(loss=total)
            optimizer.zero_grad()


def _samples(case: Case, step: int, microbatch: int, rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    x = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64)
    if world_size == 1:
        return x, y
    shares = list(case.shares or (SAMPLES // WORLD_SIZE,) * WORLD_SIZE)
    return x.split(shares)[rank], y.split(shares)[rank]


def _sharded(case: Case, module: Any) -> nn.Module:
    options = dict(case.options)
    if case.api == "DDP":
        return DistributedDataParallel(module, **options)
    package = PACKAGES[case.contestant.partition(" ")[0]]
    if "mesh" in options:
        options["mesh"] = init_device_mesh("cpu", options["mesh"], mesh_dim_names=("replicate", "shard"))
    ignored = {p for name, p in module.named_parameters() if case.ignored and name.startswith(case.ignored)}
    if case.api == "FSDP2":
        options |= {"ignored_params": ignored} if ignored else {}
        for block in module.blocks:
            package.fully_shard(block, **options)
        return package.fully_shard(module, **options)
    if "mesh" in options:
        options |= {"device_mesh": options.pop("mesh"), "sharding_strategy": "HYBRID_SHARD"}
    if "sharding_strategy" in options:
        options["sharding_strategy"] = package.ShardingStrategy[options["sharding_strategy"]]
    return package.FullyShardedDataParallel(
        module,
        auto_wrap_policy=package.wrap.ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
        ignored_states=list(ignored) or None,
        **options,
    )


def _held_back(model: Any, reduces: bool) -> Any:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(reduces)
        return nullcontext()
    return nullcontext() if reduces or not hasattr(model, "no_sync") else model.no_sync()
