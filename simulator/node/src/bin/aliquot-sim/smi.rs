//! The commands of `nvidia-smi` that node agents and examples run.

use std::fmt::Write;

use aliquot_sim_node::Node;

use crate::{CliError, query};

const USAGE: &str = "this stand-in knows: without arguments; -L; --query-gpu=PROPERTIES --format=csv[,noheader][,nounits]; -c MODE [-i ID]; -r -i ID; \
compute-policy --set-timeslice=0..3 [-i ID]   (ID: index, UUID or PCI address; MODE: 0, 2 or 3)";

/// Runs one command.
pub(crate) fn run(words: &[String]) -> Result<String, CliError> {
    let address = run as *const () as usize;
    let node = Node::discover(address)?;
    if node.module().is_none() {
        return Err(CliError::Usage(
            "the NVIDIA driver does not answer: the module nvidia is not loaded".to_owned(),
        ));
    }
    // `--name=value` is `--name value`.
    let mut words: Vec<String> = words
        .iter()
        .flat_map(|w| match w.split_once('=').filter(|_| w.starts_with("--")) {
            Some((name, value)) => vec![name.to_owned(), value.to_owned()],
            None => vec![w.clone()],
        })
        .collect();
    let targets = targets(&node, value_of(&mut words, &["-i", "--id"])?.as_deref())?;
    let query = value_of(&mut words, &["--query-gpu"])?;
    if let Some(names) = query {
        let format = value_of(&mut words, &["--format"])?.unwrap_or_default();
        return match words.first() {
            None => query::run(&names, &format),
            Some(_) => Err(CliError::Usage(USAGE.to_owned())),
        };
    }
    let timeslice = value_of(&mut words, &["--set-timeslice", "-s"])?;
    let mode = value_of(&mut words, &["-c", "--compute-mode"])?;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match (words.as_slice(), timeslice, mode) {
        ([], None, None) => query::overview(),
        (["-L" | "--list-gpus"], None, None) => list(&node),
        (["compute-policy"], Some(value), None) => {
            let value = number(&value, 3)?;
            targets.iter().try_for_each(|&gpu| node.set_timeslice(gpu, value))?;
            Ok("All done.\n".to_owned())
        }
        ([], None, Some(value)) => {
            let names = ["DEFAULT", "", "PROHIBITED", "EXCLUSIVE_PROCESS"];
            let value = match names.iter().zip(0_u32..).find(|(name, _)| **name == value) {
                Some((_, mode)) => mode,
                None => number(&value, 3)?,
            };
            targets.iter().try_for_each(|&gpu| node.set_compute_mode(gpu, value))?;
            Ok("All done.\n".to_owned())
        }
        (["-r" | "--gpu-reset"], None, None) => {
            targets.iter().try_for_each(|&gpu| node.reset(gpu))?;
            Ok("All done.\n".to_owned())
        }
        _ => Err(CliError::Usage(USAGE.to_owned())),
    }
}

fn list(node: &Node) -> Result<String, CliError> {
    let mut out = String::new();
    let sight = node.sight();
    let seen = |gpu: &&aliquot_sim_node::Gpu| node.minor(gpu.index).is_ok_and(|minor| sight.gpu(minor));
    for (index, gpu) in node.gpus().iter().filter(seen).enumerate() {
        // Writing to a String does not fail.
        let _ = writeln!(out, "GPU {index}: {} (UUID: {})", gpu.board.product, gpu.uuid);
        let mut devices = node.mig_devices(gpu.index)?;
        let minor = node.minor(gpu.index)?;
        devices.retain(|d| sight.mig_device(minor, d.gi.id, d.ci.id));
        for (index, mig) in devices.iter().enumerate() {
            let _ = writeln!(out, "  MIG {:<12} Device {index:>2}: (UUID: {})", mig.name, mig.uuid);
        }
    }
    Ok(out)
}

fn targets(node: &Node, id: Option<&str>) -> Result<Vec<usize>, CliError> {
    let Some(id) = id else { return Ok(node.gpus().iter().map(|g| g.index).collect()) };
    let matches = |gpu: &&aliquot_sim_node::Gpu| {
        gpu.index.to_string() == id
            || gpu.uuid == id
            || gpu.bdf().eq_ignore_ascii_case(id)
            || gpu.nvml_bus_id().eq_ignore_ascii_case(id)
    };
    let found = node.gpus().iter().find(matches).map(|g| vec![g.index]);
    found.ok_or_else(|| CliError::Usage(format!("no GPU {id:?}")))
}

fn value_of(words: &mut Vec<String>, names: &[&str]) -> Result<Option<String>, CliError> {
    let Some(place) = words.iter().position(|w| names.contains(&w.as_str())) else { return Ok(None) };
    let name = words.remove(place);
    if place < words.len() {
        return Ok(Some(words.remove(place)));
    }
    Err(CliError::Usage(format!("{name} needs a value")))
}

fn number(word: &str, most: u32) -> Result<u32, CliError> {
    let value: Option<u32> = word.parse().ok().filter(|n| *n <= most);
    value.ok_or_else(|| CliError::Usage(format!("{word:?} is not a number from 0 to {most}")))
}
