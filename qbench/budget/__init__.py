"""Choose the settings of each layer under a budget of bits, and test whether the mix is better."""
