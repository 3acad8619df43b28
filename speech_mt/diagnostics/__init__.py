"""What attention and the residual stream are doing: pure functions first, tensors in and tensors out.

attention_entropy  entropy per head and query without the attention matrix, visible keys, largest logit
spectra            spectral norms, W_Q W_K^T per head, effective rank, energy concentration, the entropy bound
oversmoothing      token cosine, HFC/LFC, rank-collapse residual, attention-map similarity, the spectrum of H
sharpness          largest eigenvalue of the loss's Hessian, also preconditioned as Adam sees it
spikes             share of updates whose loss or gradient norm is far from the recent mean
"""
