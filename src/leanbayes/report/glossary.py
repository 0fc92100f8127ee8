"""What the terms of a report mean, in two sentences each; docs/metrics.md has the same words."""

GLOSSARY = {
    "accuracy": (
        "The share of the test examples whose most probable class is the true one. It says nothing of how sure the "
        "model was."
    ),
    "top-5": (
        "The share of the test examples whose true class is among the five most probable. With hundreds of classes it "
        "forgives mistakes between classes that look alike."
    ),
    "NLL": (
        "Minus the logarithm of the probability that the model gave to the truth, averaged, in nats. It rewards being "
        "right and being honest at once, so it is the first number to look at."
    ),
    "Brier": (
        "The squared distance between the predicted probabilities and the truth, averaged; from 0 to 2 for classes. "
        "Like the NLL it rewards honesty, but a single sure mistake costs at most 2."
    ),
    "ECE": (
        "The gap between confidence and accuracy, in 15 bins of equal width, weighted by how many examples each holds "
        "(Guo et al. 2017). 0 means that of the answers given with 80 % confidence, 80 % are right."
    ),
    "adaptive ECE": (
        "The same gap in 15 bins that hold equally many examples. It does not rest on a few bins when nearly all "
        "answers are sure."
    ),
    "class-wise error": (
        "The debiased L2 calibration error of the probability of every class, in 15 bins of equal mass (Kumar et al. "
        "2019). Some papers print this number under the name ECE, and it is usually much smaller."
    ),
    "reliability": ("Accuracy drawn over confidence. On the diagonal, confidence can be taken at its word."),
    "AURC": (
        "The mean share of mistakes among the answers when the model answers its surest examples first, over all "
        "numbers of answers. Small means that mistakes are where the model says that it is unsure."
    ),
    "coverage at 1 % risk": (
        "The largest share of the examples that can be answered so that at most 1 % of the answers are wrong. The "
        "rest would go to a person."
    ),
    "entropy": (
        "How spread out the predicted probabilities are, in nats: 0 is certain, log(classes) is a guess. It is the "
        "total uncertainty: from noise in the data, and from what the model does not know."
    ),
    "mutual information": (
        "The part of the entropy that comes from draws of the weights disagreeing. More training data would remove "
        "it, so it is the doubt to look at for new kinds of input."
    ),
    "AUROC": (
        "The probability that an example from elsewhere looks less sure than a test example; ties count half. 50 % is "
        "guessing, 100 % tells them apart without fault."
    ),
    "AUPR": (
        "The area under precision over recall when one of the two kinds is to be found (in: the test data, out: the "
        "others). Unlike the AUROC it depends on how many there are of each."
    ),
    "FPR at 95 % TPR": (
        "Where the threshold lets 95 % of the test examples pass, the share of examples from elsewhere that pass too. "
        "Small is good; FPR at 85 % is the same with 85 %."
    ),
    "corrupted": (
        "Noise, blur, weather and digital faults at five severities, after Hendrycks and Dietterich (2019). "
        "A good model loses accuracy slowly, and its confidence falls with it."
    ),
    "doubt follows noise": (
        "Spearman's rank correlation between the noise in the inputs and the mean entropy (of a regression, the mean "
        "predicted std). 1 means that the model is less sure at every level of more noise."
    ),
    "RMSE": (
        "The root of the mean squared error of the predicted mean, in the unit of the target. It says nothing of the "
        "predicted spread."
    ),
    "CRPS": (
        "How far the predicted distribution lies from the truth, in the unit of the target; for a point prediction it "
        "is the absolute error. It rewards being near and being honest at once."
    ),
    "interval error": (
        "The gap between the probability that an interval claims and the share of the truths inside it, averaged over "
        "levels from 5 to 95 % (after Kuleshov et al. 2018). It is for numbers what the ECE is for classes."
    ),
    "95 % interval": (
        "The share of the truths inside the predicted 95 % interval, which should be 95 %. Its width tells how sharp "
        "the prediction is: of two models that both hold, the narrower one is better."
    ),
    "epistemic std": (
        "How far the means of the draws lie apart: the part of the predicted spread that comes from the weights. More "
        "training data would make it smaller."
    ),
    "mIoU": (
        "Of the pixels that are a class or are taken for it, the share that are both, averaged over the classes. "
        "Small classes count as much as large ones."
    ),
    "FLOPs": (
        "Multiplications and additions in the products of one prediction, all draws together, where a weight that is "
        "exactly zero costs nothing. It is counted, not measured: dense kernels do not skip zeros."
    ),
    "moved": (
        "Bytes that the operations of one prediction read and write. On most machines this, not arithmetic, is what "
        "takes the time."
    ),
    "infidelity": (
        "How far a saliency map is from telling what a small change of the inputs does to the output, squared and "
        "averaged (Yeh et al. 2019). 0 is perfect, and the unit is that of the squared output."
    ),
    "sensitivity": (
        "The largest relative change of a saliency map when the inputs change a little (Yeh et al. 2019). Small means "
        "that the explanation of an example is also that of its neighbours."
    ),
    "map spread": (
        "How far the saliency maps of the draws lie apart, relative to their mean. Large means that the explanation "
        "itself is unsure."
    ),
    "pruning": (
        "Setting the least important weights of all layers to zero, by the size of their mean or by that size in units "
        "of their spread. A model that stays good for long can be made small."
    ),
    "× plain": (
        "A cost over that of the plain network of the same architecture, called without this library, and measured in "
        "turns. A deterministic model therefore takes a little more than 1×: what it adds are checks and entropies."
    ),
    "interval": (
        "The 95 % interval of the mean over seeds, by Student's t distribution. A method is called the winner only "
        "where the interval of its paired difference to the others says so."
    ),
}
