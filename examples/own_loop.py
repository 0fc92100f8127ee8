"""Your own training loop: a Bayesian network on handwritten digits, with the hooks that any method may need.

`lb.fit` is such a loop with mixed precision, many processes, checkpoints and logs; nothing in leanbayes needs it.
"""

import torch

import leanbayes as lb
from leanbayes.data import Batches, load
from leanbayes.models import build


def main() -> None:
    """Train, refresh BatchNorm, and look at what the model is unsure of."""
    epochs, data = 10, load("digits")
    batches = Batches(data.train, 64, normalise=data.normalise)
    method = lb.MeanField()
    bnn = lb.bayesianize(build("small-cnn", data.input_shape, data.outputs, seed=0), method)
    print(bnn.report)

    training = lb.Training(bnn, steps=epochs * len(batches), num_data=len(data.train), batches=batches.epoch)
    method.start(training)
    bnn = training.model  # a method may put another in its place
    means = torch.optim.AdamW(bnn.mean_parameters(), lr=2e-3)
    spreads = torch.optim.Adam(bnn.scale_parameters(), lr=1e-2)
    training.optimisers = [means, spreads]
    for epoch in range(epochs):
        for x, y in batches.epoch(epoch):
            # A cold posterior, whose KL comes in over the first half: there are more weights than images.
            training.temperature = 1e-3 * min(1.0, 2 * training.step / training.steps)
            method.before_step(training)
            loss = lb.elbo(bnn, x, y, num_data=training.num_data, temperature=training.temperature)
            loss.backward()
            for optimiser in training.optimisers:
                optimiser.step()
                optimiser.zero_grad()
            training.batch = (x, y)
            method.after_step(training)
            training.step += 1
        print(f"epoch {epoch + 1} of {epochs}: loss {loss.item():.4f}")
    bnn.refresh_batchnorm(batches.epoch())

    x, y = next(Batches(data.test, len(data.test), shuffle=False, normalise=data.normalise).epoch())
    prediction = bnn.predict(x, samples=30, generator=torch.Generator().manual_seed(0))
    right = prediction.label == y
    print(f"{right.float().mean():.1%} of {len(y)} digits are right.")
    print(f"Mean uncertainty where right: {prediction.entropy[right].mean():.3f} nats")
    print(f"Mean uncertainty where wrong: {prediction.entropy[~right].mean():.3f} nats")


if __name__ == "__main__":
    main()
