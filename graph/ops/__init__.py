"""Op declarations: numpy reference, shape rule, gradient rule and test cases of each op."""
