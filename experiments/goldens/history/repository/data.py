"""Documents of characters as batches of one length: targets after the end of a document are ignored."""

import torch

TEXT = (
    "a cat sat on the mat. the dog ate a bone and slept. we read. it rains on the roof all night long. "
    "she sells shells. he ran. the sun rose over the hill and the birds sang. go home. they built a house of stone."
)
CHARACTERS = sorted(set(TEXT))
IGNORED = -1
DOCUMENTS = [sentence.strip() + "." for sentence in TEXT.split(".") if sentence]


def encode(text):
    return torch.tensor([CHARACTERS.index(character) for character in text])


def sample(document, context):
    """Inputs and targets of a document: each character's target is the next one."""
    tokens = encode(document)[: context + 1]
    inputs = torch.zeros(context, dtype=torch.long)
    targets = torch.full((context,), IGNORED)
    inputs[: len(tokens) - 1] = tokens[:-1]
    targets[: len(tokens) - 1] = tokens[1:]
    return inputs, targets


def steps(config):
    """The microbatches of each step, in an order that the seed decides."""
    generator = torch.Generator().manual_seed(config["seed"])
    for _ in range(config["steps"]):
        microbatches = []
        for _ in range(config["accumulate"]):
            chosen = torch.randint(len(DOCUMENTS), (config["batch"],), generator=generator)
            samples = [sample(DOCUMENTS[i], config["context"]) for i in chosen.tolist()]
            microbatches.append(tuple(torch.stack(part) for part in zip(*samples, strict=True)))
        yield microbatches
