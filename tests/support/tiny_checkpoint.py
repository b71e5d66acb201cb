"""A checkpoint of a tiny model with a byte-level tokenizer, as released models have one."""

import dataclasses
from pathlib import Path

import tokenizers

from problems.dsv4_forward.checkpoint import checkpoint
from problems.dsv4_forward.weights import tree
from problems.dsv4_forward.weights.config import CSA, HCA, SWA, TINY, Config

CFG = dataclasses.replace(
    TINY,
    name="small",
    compress_ratios=(CSA, HCA, SWA),
    num_nextn_predict_layers=1,
    num_hash_layers=1,
    max_position_embeddings=48,
)
TRAINED = ["Once upon a time there was a time", "upon the time", "Grüße, Grüße"]  # what its longer tokens are from


def write(folder: Path, cfg: Config = CFG) -> Path:
    """Write it into `folder`, made if need be, with weights in fp32. -> the folder."""
    checkpoint.save(tree.random(cfg, "fp32", seed=2), folder, "plain")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"], show_progress=False
    )
    made.train_from_iterator(TRAINED, trainer)
    made.save(str(folder / "tokenizer.json"))
    return folder
