"""Writes this folder with peft and torch: adapters of models in ../huggingface, and
what they make of tokens.

Run from the repository root: python tests/data/peft/make.py
"""

import shutil
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

HERE = Path(__file__).parent
BASES = HERE.parent / "huggingface"
ADAPTERS = {
    "llama": {
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "r": 4,
        "lora_alpha": 8,
    },
    "gpt2": {
        "target_modules": ["c_attn"],
        "r": 2,
        "lora_alpha": 6,
        "fan_in_fan_out": True,
    },
}


def main() -> None:
    for name, options in ADAPTERS.items():
        torch.manual_seed(0)
        base = transformers.AutoModelForCausalLM.from_pretrained(
            BASES / name, dtype=torch.float32
        )
        model = peft.get_peft_model(
            base, peft.LoraConfig(task_type="CAUSAL_LM", **options)
        ).eval()
        for path, parameter in model.named_parameters():
            if "lora_B" in path:
                torch.nn.init.normal_(parameter, std=0.3)
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder)
        (folder / "README.md").unlink(missing_ok=True)
        config = folder / "adapter_config.json"
        config.write_text(
            config.read_text().replace(str(BASES / name), f"../../huggingface/{name}")
        )
        tokens = np.load(BASES / name / "tokens.npy")
        with torch.no_grad():
            np.save(
                folder / "logits.npy",
                model(torch.tensor(tokens, dtype=torch.long)).logits.numpy(),
            )


if __name__ == "__main__":
    main()
