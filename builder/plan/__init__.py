"""What is to be built: the request, the recipe of the model, and the plan of one engine."""
