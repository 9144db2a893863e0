"""What a model is, without arithmetic: configs, components, sites, tensors, recipes, shards."""
