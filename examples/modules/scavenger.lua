-- For Lmod: copy it to <modules>/scavenger/VERSION.lua; `module load scavenger` then has the command.
help([[Idle GPUs of this cluster as rollout capacity for RL of language models: scavenger --help]])
whatis("Name: scavenger")
whatis("Description: reinforcement learning of language models on idle GPUs")

-- The venv of docs/install.md, on a file system that the compute nodes see.
local base = "/opt/scavenger"
prepend_path("PATH", pathJoin(base, "bin"))
-- Where the site's users find the daemon's configuration, if they may read it:
-- setenv("SCAVENGER_CONFIG", "/etc/scavenger/scavenger.toml")
