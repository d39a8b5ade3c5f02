"""The whole change to a training script: the name of the backend."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

size = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = Qwen3Config(**size, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
model = torch.compile(Qwen3ForCausalLM(config), backend="shared_prefix")

prompt, completions = torch.randint(1000, (1, 200)).expand(8, -1), torch.randint(1000, (8, 40))
ids = torch.cat([prompt, completions], dim=1)
loss = model(input_ids=ids, labels=ids, use_cache=False).loss
loss.backward()
print(f"loss {loss.item():.4f} over 8 rows that share a prompt of 200 tokens")
