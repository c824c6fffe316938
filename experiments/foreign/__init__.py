"""Pairs of public implementations of one architecture, neither written by this project: are they aligned and compared rightly?

**Frozen** by the commit that adds this sentence: from there on neither scripts nor expected answers are edited. They are then run
once, `python -m experiments foreign`. Until then `crossframe map` and `crossframe compare` had seen none of them.

| pair | a | b | what differs in how parameters are stored |
|---|---|---|---|
| `gpt2` | transformers, torch | transformers, flax.linen | names; linear layers of torch are `Conv1D`; a tied output layer |
| `bert` | transformers, torch | transformers, flax.linen | names, transposed; tied, with a bias |
| `t5` | transformers, torch | transformers, flax.linen | names, transposed; tied between encoder, decoder and output |
| `mistral` | transformers, torch | transformers, flax.linen | names, transposed |
| `llama` | transformers, torch | levanter, haliax | all layers stacked; heads split |
| `llama_interleaved` | transformers, torch | torchtune, torch | rotary halves of queries and keys interleaved |
| `qwen3` | litgpt, torch | tunix, flax.nnx | queries, keys and values are one matrix in a; heads split in b |
| `qwen3_moe` | transformers, torch | tunix, flax.nnx | experts of a layer stacked; heads split |
| `gemma` | litgpt, torch | tunix, flax.nnx | one matrix of queries, keys and values in a; keys and values are one array in b |
| `pythia` | transformers, torch | litgpt, torch | queries, keys and values interleaved by head in a, by kind in b |
| `resnet` | timm, torch | transformers, flax.linen | convolutions; batch norm |
| `vit` | timm, torch | equimo, equinox | names; embeddings without a leading dim, a bias of (width, 1, 1) |
| `clip` | open_clip, torch | transformers, flax.linen | two towers; queries, keys and values are one parameter in a |

Each folder has the two scripts and `pair.toml`: the environment of each side (`environments/`, with versions and licences), the
dtype, and a fault that one side has with `--fault`, with the answers that are expected. The scripts train the libraries' own
models, by plain SGD on random batches, in float64 where both libraries compute in it. Each writes its losses; both sides of
every pair agree to rounding in all steps. Small configurations and random values: nothing is downloaded but packages.

Side b begins with the values of side a, converted by a library where one can, else by hand in the script (`convert`). The
conversion is the expected map, and `crossframe` does not see it: the runner converts an array of numbers, each of which occurs
once, so that it knows of each element of b which element of a it is. `expected.json` lists which parameters each one of b is
made of, and a digest of all elements. A parameter of b is **matched** if the map that was found gives exactly its elements,
**undecided** if the map does not have it, and **wrong** otherwise. Verdicts, and whether a fault is found and located, are
judged as for the untouched cases.

`results/foreign.md` has the results of that one run, `results/corrected.md` those after the corrections that it led to, which are
tuned on these pairs. One correction is of the judging: the numbers of transposed arrays were written in another order, so that
maps of clip, gemma, qwen3, qwen3_moe and resnet were judged wrong that are right. Their digests in `expected.json` are new.

What is known to differ and is not part of a pair is in `disagreements/`.
"""
