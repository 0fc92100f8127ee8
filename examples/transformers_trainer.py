"""Train a Bayesian language model with the Trainer of transformers: a small GPT learns to continue number sequences.

    pip install '.[train]' transformers
    python examples/transformers_trainer.py

The mixin needs nothing but the model: the loss is the ELBO, and evaluation averages over the weights.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import leanbayes as lb
from leanbayes.training import TrainerMixin

MODULUS, LENGTH = 10, 12


class BayesianTrainer(TrainerMixin, Trainer):  # type: ignore[misc]
    """The whole integration."""


def sequences(steps: list[int]) -> list[dict[str, torch.Tensor]]:
    """Return sequences that go up by a constant step, modulo 10; 10 begins a sequence."""
    starts = torch.arange(MODULUS).repeat(len(steps), 1)
    up = torch.tensor(steps)[:, None, None] * torch.arange(LENGTH)
    rows = ((starts[..., None] + up) % MODULUS).view(-1, LENGTH)
    rows = torch.cat([torch.full((len(rows), 1), MODULUS), rows], 1)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


def main() -> None:
    """Train by both engines, evaluate, and continue a sequence with the uncertainty of each token."""
    data = sequences([1, 2])
    sizes = {"vocab_size": MODULUS + 1, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    for engine, lr in (("backprop", 1e-2), ("ivon", 0.5)):
        torch.manual_seed(0)
        network = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, bos_token_id=MODULUS, eos_token_id=MODULUS))
        bnn = lb.bayesianize(network, lb.MeanField(engine=engine, init_std=0.02), seed=0)
        arguments = TrainingArguments(
            "trainer", max_steps=200, per_device_train_batch_size=10, learning_rate=lr, lr_scheduler_type="constant",
            use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = BayesianTrainer(bnn, arguments, train_dataset=data, eval_dataset=data, temperature=0.1)
        trainer.train()
        print(f"{engine}: NLL per token {trainer.evaluate()['eval_loss']:.3f}")
        found = lb.generate(bnn, torch.tensor([[MODULUS, 4, 6, 8]]), max_new_tokens=4)
        tokens, entropy = found.sequences[0, 4:].tolist(), [round(value, 2) for value in found.entropy[0].tolist()]
        print(f"{engine}: 4 6 8 continues with {tokens}, entropies {entropy}")


if __name__ == "__main__":
    main()
