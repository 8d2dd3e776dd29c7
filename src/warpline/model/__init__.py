"""What GPT-2 is: parameters, the readable model, weights, tokenizer, costs."""
