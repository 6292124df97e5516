"""Does a detector survive an attacker who knows it, with all its parameters?

python -m experiments.perfect_knowledge --defense=dropout
python -m experiments.perfect_knowledge --defense=dropout --preset=paper --num_images=200
python -m experiments.perfect_knowledge --defense=none --targets=untargeted
"""

from absl import flags

from experiments import common, evaluation

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(evaluation)

if __name__ == "__main__":
    common.run(lambda: evaluation.main("perfect_knowledge"))
