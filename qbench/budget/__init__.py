"""Choose the settings of each layer under a budget of bits, and prove that the mix is better."""
