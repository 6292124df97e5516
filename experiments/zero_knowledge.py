"""Does a detector see attacks by someone who does not know that it is there? The least it must do.

python -m experiments.zero_knowledge --defense=dropout
python -m experiments.zero_knowledge --defense=dropout --confidence=20
"""

from absl import flags

from experiments import common, evaluation

flags.adopt_module_key_flags(common)
flags.adopt_module_key_flags(evaluation)

if __name__ == "__main__":
    common.run(lambda: evaluation.main("zero_knowledge"))
