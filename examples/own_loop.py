"""Train a Bayesian network in your own training loop, on handwritten digits.

`lb.fit` adds mixed precision, multiple processes, checkpoints and logs to such a loop, but nothing in leanbayes needs
it. The method hooks (`start`, `after_step`) make the loop work with every method; for mean-field they do nothing.
"""

import torch

import leanbayes as lb
from leanbayes.data import Batches, load
from leanbayes.networks import build


def main() -> None:
    """Train, refresh BatchNorm, and compare the uncertainty of correct and wrong predictions."""
    epochs, data = 10, load("digits")
    batches = Batches(data.train, 64, normalize=data.normalize)
    method = lb.MeanField()
    bnn = lb.bayesianize(build("small-cnn", data.input_shape, data.outputs, seed=0), method)
    print(bnn.report)

    training = lb.Training(bnn, steps=epochs * len(batches), num_data=len(data.train), batches=batches.epoch)
    method.start(training)
    bnn = training.model  # some methods replace the model
    means = torch.optim.AdamW(bnn.mean_parameters(), lr=2e-3)
    stds = torch.optim.Adam(bnn.scale_parameters(), lr=1e-2)
    training.optimizers = [means, stds]
    for epoch in range(epochs):
        for x, y in batches.epoch(epoch):
            # A cold posterior with KL warm-up, because there are more weights than images.
            training.temperature = 1e-3 * min(1.0, 2 * training.step / training.steps)
            loss = lb.elbo_loss(bnn, x, y, num_data=training.num_data, temperature=training.temperature)
            loss.backward()
            for optimizer in training.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            training.batch = (x, y)
            method.after_step(training)
            training.step += 1
        print(f"Epoch {epoch + 1}/{epochs}: loss {loss.item():.4f}")
    bnn.refresh_batchnorm(batches.epoch())

    x, y = next(Batches(data.test, len(data.test), shuffle=False, normalize=data.normalize).epoch())
    prediction = bnn.predict(x, samples=30, generator=torch.Generator().manual_seed(0))
    correct = prediction.label == y
    print(f"Test accuracy: {correct.float().mean():.1%} of {len(y)} digits")
    print(f"Mean entropy of correct predictions: {prediction.entropy[correct].mean():.3f} nats")
    print(f"Mean entropy of wrong predictions:   {prediction.entropy[~correct].mean():.3f} nats")


if __name__ == "__main__":
    main()
