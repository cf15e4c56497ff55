//! `aliquot-image`: writes container images without a container engine. See [`archive`].
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "test code"))]

mod archive;
mod extract;
mod layer;
mod oci;
mod sbom;

use anyhow::{Context, Result};
use archive::Image;
use clap::{Args, Parser, Subcommand};
use extract::Contents;
use oci::Process;
use sbom::Component;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

/// Writes container images without a container engine: the same files give the same bytes.
#[derive(Debug, Parser)]
#[command(name = "aliquot-image", version)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Packs directories into one OCI archive with an image for each machine.
    Pack(Pack),
    /// Writes what is in an image as a CycloneDX bill of materials. Reads `cargo metadata` from standard input.
    Sbom(Sbom),
    /// Says what an archive holds: its name, its digest and its machines, each after its word on a line of its own.
    Show(Show),
    /// Takes a file out of the image of each machine: into DIRECTORY/amd64 and DIRECTORY/arm64.
    Extract(Extract),
}

#[derive(Debug, Args)]
struct Pack {
    /// Repository and tag.
    #[arg(long)]
    name: String,
    /// Time of all files and of the image, in seconds of Unix time: that of the source.
    #[arg(long)]
    time: u64,
    /// A machine's layer, the lowest first: amd64=DIRECTORY or arm64=DIRECTORY.
    #[arg(long = "layer", required = true, value_parser = pair)]
    layers: Vec<(String, String)>,
    /// User and group of a container's process.
    #[arg(long, default_value = "65532:65532")]
    user: String,
    /// A label of the image: NAME=VALUE.
    #[arg(long = "label", value_parser = pair)]
    labels: Vec<(String, String)>,
    /// Where to.
    #[arg(long)]
    output: PathBuf,
}

#[derive(Debug, Args)]
struct Sbom {
    /// Repository of the image.
    #[arg(long)]
    name: String,
    /// Its version.
    #[arg(long)]
    version: String,
    /// A crate of the workspace that is in it.
    #[arg(long = "crate", required = true)]
    crates: Vec<String>,
    /// Another package in it, as a package URL.
    #[arg(long = "package", value_parser = Component::of_purl)]
    packages: Vec<Component>,
    /// Copy the licences of its crates from others into this directory.
    #[arg(long)]
    licences: Option<PathBuf>,
    /// Where to.
    #[arg(long)]
    output: PathBuf,
}

#[derive(Debug, Args)]
struct Show {
    /// The archive.
    archive: PathBuf,
}

#[derive(Debug, Args)]
struct Extract {
    /// The archive.
    archive: PathBuf,
    /// The file's path in the image, without a leading slash.
    #[arg(long)]
    path: PathBuf,
    /// Where to.
    #[arg(long)]
    into: PathBuf,
}

fn pair(text: &str) -> Result<(String, String)> {
    let (name, value) = text.split_once('=').with_context(|| format!("{text:?} is not NAME=VALUE"))?;
    Ok((name.to_owned(), value.to_owned()))
}

fn main() -> Result<()> {
    match Cli::parse().task {
        Task::Pack(pack) => pack.run(),
        Task::Sbom(sbom) => sbom.run(),
        Task::Show(show) => show.run(),
        Task::Extract(extract) => extract.run(),
    }
}

impl Pack {
    fn run(self) -> Result<()> {
        let mut machines: BTreeMap<String, Vec<_>> = BTreeMap::new();
        for (machine, directory) in &self.layers {
            let layer = layer::of(directory.as_ref(), self.time)?;
            machines.entry(machine.clone()).or_default().push(layer);
        }
        let process = Process {
            user: self.user,
            env: vec!["PATH=/usr/bin".to_owned()],
            entrypoint: Vec::new(),
            labels: self.labels.into_iter().collect(),
        };
        let image = Image { name: self.name, time: self.time, process };
        let shown = self.output.display();
        // Whole or not at all.
        let draft = self.output.with_extension("draft");
        let file = File::create(&draft).with_context(|| format!("cannot make {}", draft.display()))?;
        archive::write(&image, &machines, BufWriter::new(file))
            .with_context(|| format!("cannot write {shown}"))?;
        fs::rename(&draft, &self.output).with_context(|| format!("cannot write {shown}"))
    }
}

fn contents(archive: &Path) -> Result<Contents> {
    let file = File::open(archive).with_context(|| format!("cannot open {}", archive.display()))?;
    Contents::read(BufReader::new(file)).with_context(|| format!("cannot read {}", archive.display()))
}

impl Show {
    fn run(self) -> Result<()> {
        let contents = contents(&self.archive)?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "name {}\ndigest {}", contents.name, contents.digest)?;
        contents.machines().try_for_each(|machine| Ok(writeln!(out, "machine {machine}")?))
    }
}

impl Extract {
    fn run(self) -> Result<()> {
        let name = self.path.file_name().context("the path names no file")?;
        let contents = contents(&self.archive)?;
        for machine in contents.machines() {
            let file = contents.file(machine, &self.path);
            let content = file.with_context(|| format!("cannot use {}", self.archive.display()))?;
            let dir = self.into.join(machine);
            let to = dir.join(name);
            fs::create_dir_all(&dir)
                .and_then(|()| fs::write(&to, content))
                .with_context(|| format!("cannot write {}", to.display()))?;
        }
        Ok(())
    }
}

impl Sbom {
    fn run(self) -> Result<()> {
        let metadata = std::io::read_to_string(std::io::stdin()).context("cannot read standard input")?;
        let metadata = cargo_metadata::MetadataCommand::parse(metadata)
            .context("standard input is not from cargo metadata")?;
        let sbom = sbom::of(&self.name, &self.version, &self.crates, &metadata, &self.packages)?;
        if let Some(licences) = &self.licences {
            sbom::copy_licences(&self.crates, &metadata, licences)?;
        }
        let text = serde_json::to_vec_pretty(&sbom)?;
        fs::write(&self.output, text).with_context(|| format!("cannot write {}", self.output.display()))
    }
}
