"""Trains an LSTM on random documents by truncated backpropagation through time, with an optimizer in backward.

python train.py [--in-backward] [--accumulate 2 --no-spectral]
    [--compile] [--cell] [--bfloat16] [--mistake]

Each lane of the batch reads one document after another in windows. The state of a lane goes on from window to window,
without gradients, and begins with zeros in a new document.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--lanes", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1, help="Groups of lanes, one backward each.")
parser.add_argument(
    "--no-spectral", action="store_true", help="Without the norm that takes a step of its own in each forward."
)
parser.add_argument("--in-backward", action="store_true", help="An optimizer for each parameter, in a hook.")
parser.add_argument("--cell", action="store_true", help="Loop over LSTMCell instead of calling LSTM.")
parser.add_argument("--compile", action="store_true", help="Compile the model, with the backend aot_eager.")
parser.add_argument("--bfloat16", action="store_true", help="Autocast to bfloat16.")
parser.add_argument("--mistake", action="store_true", help="The state of a lane goes on into its next document.")
args = parser.parse_args()

TOKENS, WIDTH, WINDOW = 40, 32, 10


def documents() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of each lane, and whether a document begins; documents begin where windows do."""
    generator = torch.Generator().manual_seed(1)
    length = args.steps * WINDOW + 1
    steps = torch.randint(1, 4, (args.lanes, length), generator=generator)
    tokens = steps.cumsum(1) % TOKENS
    begins = torch.zeros(args.lanes, args.steps, dtype=torch.bool)
    begins[:, 0] = True
    for lane in range(args.lanes):  # the first other documents begin in step 2
        begins[lane, 2 + lane % (args.steps - 2)] = lane % 2 == 0
    return tokens, begins


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.mix = nn.Linear(WIDTH, WIDTH) if args.no_spectral else spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.project = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.zeros(TOKENS))

    def recur(self, x, h, c):
        if not args.cell:
            x, (h, c) = self.lstm(x, (h[None], c[None]))
            return x, h[0], c[0]
        weights = [getattr(self.lstm, f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        outputs = []
        for t in range(x.shape[1]):
            h, c = torch.lstm_cell(x[:, t], (h, c), *weights)
            outputs.append(h)
        return torch.stack(outputs, 1), h, c

    def forward(self, tokens, h, c):
        x = self.embed(tokens)
        x, h, c = self.recur(x + torch.tanh(self.mix(x)), h, c)
        return F.linear(self.project(self.norm(x)), self.embed.weight, self.bias), h, c  # tied to the embedding


def optimizer_of(parameters):
    return torch.optim.AdamW(parameters, lr=5e-3, weight_decay=0.01, foreach=False)


def main() -> None:
    torch.manual_seed(0)
    model = Model()
    if args.in_backward:
        optimizers = {p: optimizer_of([p]) for p in model.parameters()}

        def step_and_free(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step_and_free)
    else:
        optimizer = optimizer_of(model.parameters())
    called = torch.compile(model, backend="aot_eager") if args.compile else model
    tokens, begins = documents()
    h, c = torch.zeros(args.lanes, WIDTH), torch.zeros(args.lanes, WIDTH)
    for step in range(args.steps):
        goes_on = torch.ones(args.lanes, 1) if args.mistake else (~begins[:, step, None]).float()
        h, c = h.detach().float() * goes_on, c.detach().float() * goes_on
        window = tokens[:, step * WINDOW : (step + 1) * WINDOW + 1]
        total, states = 0.0, []
        for rows in torch.arange(args.lanes).chunk(args.accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
                logits, new_h, new_c = called(window[rows, :-1], h[rows], c[rows])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), window[rows, 1:].flatten()) / args.accumulate
            loss.backward()
            total += loss.item()
            states.append((new_h, new_c))
        h, c = (torch.cat(parts) for parts in zip(*states, strict=True))
        if not args.in_backward:
            optimizer.step()
            optimizer.zero_grad()
        print(f"step {step} loss {total:.9g}")


if __name__ == "__main__":
    main()
