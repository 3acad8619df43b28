"""What attention and the residual stream are doing: pure functions first, tensors in and tensors out.

attention_entropy  entropy per head and query without the attention matrix, visible keys, largest logit
spectra            spectral norms, W_Q W_K^T per head, effective rank, energy concentration, the entropy bound
oversmoothing      token cosine, HFC/LFC, rank-collapse residual, attention-map similarity, the spectrum of H
sharpness          largest eigenvalue of the loss's Hessian, also preconditioned as Adam sees it
spikes             share of updates whose loss or gradient norm is far from the recent mean

and what watches a training with them:

sites        attentions, layers and weights of a model, ours or fairseq's, and how to see what they do
monitor      what is measured when, and its sums over micro-batches and ranks
weights      gamma and spectra of every layer
collapse     tells entropy collapse from rank collapse, and both from sparse attention
tensorboard  charts of all layers, heat maps, histograms, warnings
temperature  scales attention logits in the middle of a training, as an experiment
training_log, training_loop   numbers a layer in fairseq's log; what --on-collapse makes of its loop
inspection         a checkpoint's spectra per layer, from its state dict
worries            which of those numbers stand out, and why
"""
