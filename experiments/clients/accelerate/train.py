"""Trains an encoder for pairs of sentences in a loop of its own with accelerate, as accelerate's examples do.

torchrun --nproc-per-node 2 train.py [--fsdp crossframe] [--version 1] [--batch 4] [--accumulate 2] [--mistake]
"""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--fsdp", choices=["torch", "crossframe", "none"], default="torch")
parser.add_argument("--version", type=int, choices=[1, 2], default=2, help="accelerate's fsdp_version")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--batch", type=int, default=4, help="Samples of a rank and microbatch.")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument(
    "--mistake",
    action="store_true",
    help="Clip by torch.nn.utils, which under FSDP1 knows the shards of one rank alone.",
)
options = parser.parse_args()

if options.fsdp == "crossframe":
    import torch_backend

    torch_backend.replace_torch_fsdp()

from accelerate import Accelerator, FullyShardedDataParallelPlugin  # noqa: E402
from accelerate.state import PartialState  # noqa: E402
from accelerate.utils import DistributedType, set_seed  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup  # noqa: E402

VOCABULARY, LENGTH, MAX_NORM = 128, 16, 0.1


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, VOCABULARY, (64, LENGTH), generator=generator)
    labels = torch.randint(0, 2, (64,), generator=generator)
    return DataLoader(TensorDataset(tokens, labels), batch_size=options.batch, shuffle=True)


def plugin() -> FullyShardedDataParallelPlugin | None:
    if options.fsdp == "none":
        return None
    return FullyShardedDataParallelPlugin(
        fsdp_version=options.version,
        auto_wrap_policy="TRANSFORMER_BASED_WRAP",
        transformer_cls_names_to_wrap=["BertLayer"],
        cpu_ram_efficient_loading=False,
        use_orig_params=True if options.version == 1 else None,
    )


def main() -> None:
    if options.fsdp != "none":  # accelerate shards on accelerators alone
        PartialState(cpu=True)
        PartialState._shared_state["device"] = torch.device("cpu")  # FSDP1 tells it from cpu:0
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin(), gradient_accumulation_steps=options.accumulate)
    set_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 32)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, data(), schedule)
    model.train()
    batches = iter(loader)
    for _ in range(options.steps * options.accumulate):
        tokens, labels = next(batches)
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=labels).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                if options.mistake:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                else:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), "mean")
        accelerator.print(f"loss {float(mean):.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
