"""Student of the embedded model by guidance distillation, on LandscapeWorld.

    accelerate launch training/landscape_student.py --config configs/landscape/tiny_student.yaml [KEY=VALUE ...]

Run it again to resume. Two CPU processes: torchrun --nproc_per_node 2 with the same arguments.
"""

from vidgen.recipes.command_line import main
from vidgen.recipes.landscape import train_student

if __name__ == "__main__":
    main(train_student, default_config="landscape/tiny_student")
