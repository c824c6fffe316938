"""Random walks over the vocabulary, and loaders that give a rank its part of each batch."""

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Walks(Dataset):
    def __init__(self, number: int, length: int, vocabulary: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(1, 5, (number, length + 1), generator=generator).cumsum(1) % vocabulary

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


def loader(dataset: Dataset, batch: int, rank: int, ranks: int, workers: int) -> DataLoader:
    sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=True, seed=3)
    return DataLoader(dataset, batch_size=batch, sampler=sampler, num_workers=workers)
