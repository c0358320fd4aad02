"""Who reads which samples: one global order, a plan that is equal everywhere, or fixed shards."""
