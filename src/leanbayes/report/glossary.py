"""Explanations of the terms in a report, in two sentences each. docs/metrics.md has the same text."""

GLOSSARY = {
    "accuracy": (
        "The share of the test examples whose predicted class is the true one. It does not depend on how certain the "
        "model was."
    ),
    "top-5": (
        "The share of the test examples whose true class is among the five most probable classes. It is useful for "
        "hundreds of classes, of which some are hard to distinguish."
    ),
    "NLL": (
        "The negative log-likelihood: minus the logarithm of the probability that the model gave to the true class or "
        "target, averaged, in nats. It rewards accuracy and calibration together, so compare it first."
    ),
    "Brier": (
        "The squared distance between the predicted probabilities and the true class, averaged; from 0 to 2. It also "
        "rewards accuracy and calibration, but a single confident mistake costs at most 2."
    ),
    "ECE": (
        "The expected calibration error: the gap between confidence and accuracy in 15 bins of equal width, weighted "
        "by the number of examples in each (Guo et al. 2017). 0 means that of the predictions with 80 % confidence, "
        "80 % are right."
    ),
    "adaptive ECE": (
        "The ECE with 15 bins that hold equal numbers of examples. It is more reliable if nearly all confidences are "
        "close to 100 %."
    ),
    "class-wise error": (
        "The debiased L2 calibration error of the probabilities of all classes, in 15 bins of equal mass (Kumar et "
        "al. 2019). Some papers report it as ECE, although it is usually much smaller."
    ),
    "reliability": (
        "Accuracy plotted over confidence. On the diagonal, the model is right as often as its confidence claims."
    ),
    "AURC": (
        "The area under the risk-coverage curve: the error rate if the model predicts only its most certain examples, "
        "averaged over all coverages. It is small if the model is uncertain where it is wrong."
    ),
    "coverage at 1 % risk": (
        "The largest share of the examples, the most certain first, of which at most 1 % are predicted wrongly. The "
        "other examples would go to a person."
    ),
    "error at 90 %": (
        "The share of wrong answers among the 90 % of the examples that the model is most certain of. The other 10 % "
        "would go to a person."
    ),
    "entropy": (
        "The entropy of the predicted probabilities, in nats: 0 is certain, log(classes) is a uniform guess. It is "
        "the total uncertainty, from noise in the data and from limited knowledge of the model."
    ),
    "mutual information": (
        "The part of the entropy that comes from disagreement between samples of the weights (epistemic uncertainty). "
        "More training data would reduce it, so it is suited to detect unfamiliar inputs."
    ),
    "AUROC": (
        "The probability that an out-of-distribution (OOD) example is more uncertain than a test example; ties count "
        "half. 50 % is chance, 100 % is perfect separation, and tables show the best of confidence, entropy and mutual "
        "information for each method."
    ),
    "AUPR": (
        "The area under the precision-recall curve for detecting one of the two data sets (in: the test data, out: "
        "the OOD data). Unlike the AUROC, it depends on their sizes."
    ),
    "FPR at 95 % TPR": (
        "The share of OOD examples below the uncertainty threshold that 95 % of the test examples meet. Lower is "
        "better; FPR at 85 % is the same with 85 %."
    ),
    "corrupted": (
        "Test images with noise, blur, weather and digital corruptions at five severities, after Hendrycks and "
        "Dietterich (2019). The accuracy of a good model falls slowly, and its confidence falls with it."
    ),
    "uncertainty follows noise": (
        "Spearman's rank correlation between the noise in the inputs and the mean entropy (for regression, the mean "
        "predicted std). 1 means that the uncertainty rises with every level of noise."
    ),
    "RMSE": (
        "The root mean squared error of the predicted mean, in the unit of the target. It does not depend on the "
        "predicted std."
    ),
    "CRPS": (
        "The continuous ranked probability score: the distance between the predicted distribution and the target, in "
        "the unit of the target. It rewards accuracy and calibration together; without a std it is the absolute "
        "error."
    ),
    "interval error": (
        "The gap between the nominal probability of an interval and the share of targets inside it, averaged over "
        "levels from 5 to 95 % (after Kuleshov et al. 2018). It is the counterpart of the ECE for regression."
    ),
    "95 % interval": (
        "The share of the targets inside the predicted 95 % interval, which should be 95 %. Of two models with this "
        "coverage, the one with the smaller interval width is better."
    ),
    "epistemic std": (
        "The std of the predicted means over samples of the weights: the part of the predicted std that comes from "
        "the weights. More training data would reduce it."
    ),
    "mIoU": (
        "The mean intersection over union: of the pixels that belong to a class or are predicted as it, the share for "
        "which both hold, averaged over the classes. Small classes count as much as large ones."
    ),
    "FLOPs": (
        "Multiplications and additions in the matrix products and convolutions of one prediction with all samples; "
        "weights that are exactly zero do not count. They are counted, not measured: dense kernels do not skip zeros."
    ),
    "moved": (
        "Bytes that the operations of one prediction read and write. On most machines this, not arithmetic, "
        "determines the time."
    ),
    "infidelity": (
        "The squared error with which a saliency map predicts the effect of a small change of the inputs, averaged "
        "(Yeh et al. 2019). 0 is perfect, and the unit is that of the squared output."
    ),
    "sensitivity": (
        "The largest relative change of a saliency map under a small change of the inputs (Yeh et al. 2019). Small "
        "means that similar inputs have similar explanations."
    ),
    "map std": (
        "The std of the saliency map over samples of the weights, relative to its mean. Large means that the "
        "explanation itself is uncertain."
    ),
    "pruning": (
        "Setting the least important weights of all layers to zero, ranked by |μ| or by |μ|/σ. A model whose quality "
        "stays high can be made small."
    ),
    "temperature": (
        "The plain network with its confidence rescaled by one number, which is fitted to held-out data (Guo et al. "
        "2017). It costs nothing, so a Bayesian method should beat it, too."
    ),
    "× plain": (
        "A cost divided by that of the deterministic network of the same architecture, called without this library "
        "and measured alternately. For a deterministic model it is slightly above 1×, because of checks and "
        "entropies."
    ),
    "interval": (
        "The 95 % confidence interval of the mean over seeds, by Student's t distribution. A method is marked as best "
        "only if its paired differences from the others are significant."
    ),
}
