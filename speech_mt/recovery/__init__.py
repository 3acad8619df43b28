"""What a training does about trouble: numbers that are not finite, spikes of the loss, an end from outside."""
