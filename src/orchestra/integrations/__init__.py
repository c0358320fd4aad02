"""Orchestra in the training loops of other libraries; each one needs the extra of its name."""
