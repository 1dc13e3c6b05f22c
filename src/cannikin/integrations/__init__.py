"""cannikin inside of other people's engines: one file per engine, each needing what its extra installs."""
