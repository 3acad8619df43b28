# The methods of the recipes, by name, as options of --arch spectral_transformer. To be sourced.

method_flags() {
    case $1 in
        post_ln) ;;
        pre_ln) echo "--norm-placement pre" ;;
        deepnorm) echo "--norm-placement deepnorm" ;;
        sigma_reparam) echo "--reparam sigma" ;;
        sigma_reparam_spectral) echo "--reparam sigma --reparam-gamma-init spectral" ;; # starts as the same function
        # gamma starts at the norm of DeepNorm's own initial weights, which gamma = 1 would undo
        deepnorm_sigma_reparam) echo "--norm-placement deepnorm --reparam sigma --reparam-gamma-init spectral" ;;
        *)
            echo "error: method '$1' is none of post_ln, pre_ln, deepnorm, sigma_reparam, sigma_reparam_spectral, deepnorm_sigma_reparam" >&2
            return 1
            ;;
    esac
}
