//! What is in an image, as a CycloneDX 1.6 bill of materials (<https://cyclonedx.org/docs/1.6/json/>): crates from
//! `cargo metadata`, and packages that are not built here. Without a serial number and a time, which are optional and
//! would make each one another.

use anyhow::{Context, Result};
use cargo_metadata::{DependencyKind, Metadata, PackageId};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::Path;

/// How the names of files begin that say under which licence a crate is.
const NOTICES: [&str; 5] = ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE"];

/// The bill.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Sbom {
    bom_format: &'static str,
    spec_version: &'static str,
    version: u32,
    metadata: About,
    components: Vec<Component>,
}

#[derive(Debug, Serialize)]
struct About {
    component: Component,
}

/// A part.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Component {
    name: String,
    version: String,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(rename = "bom-ref")]
    reference: String,
    #[serde(skip_serializing_if = "String::is_empty")]
    purl: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    licenses: Vec<License>,
}

/// An SPDX expression.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct License {
    expression: String,
}

impl Component {
    fn new(kind: &'static str, name: &str, version: &str, purl: String, license: Option<&str>) -> Self {
        let reference = if purl.is_empty() { format!("{name}@{version}") } else { purl.clone() };
        Self {
            kind,
            name: name.to_owned(),
            version: version.to_owned(),
            reference,
            purl,
            // An older way to write it that is none of SPDX's.
            licenses: license
                .map(|text| License { expression: text.replace('/', " OR ") })
                .into_iter()
                .collect(),
        }
    }

    /// A package that is named by a package URL (`pkg:deb/debian/libc6@2.41-12?arch=amd64`).
    ///
    /// # Errors
    /// If it names no version.
    pub(crate) fn of_purl(purl: &str) -> Result<Self> {
        let path = purl.split(['?', '#']).next().unwrap_or_default();
        let (path, version) =
            path.rsplit_once('@').with_context(|| format!("package URL {purl:?} names no version"))?;
        let name = path.rsplit('/').next().unwrap_or_default();
        Ok(Self::new("library", name, version, purl.to_owned(), None))
    }
}

/// The bill of an image with these crates of the workspace, all that they are built of, and other packages.
///
/// # Errors
/// If the workspace has no such crate, or `cargo metadata` did not say what depends on what.
pub(crate) fn of(
    name: &str,
    version: &str,
    crates: &[String],
    metadata: &Metadata,
    others: &[Component],
) -> Result<Sbom> {
    let mut components: BTreeSet<Component> = others.iter().cloned().collect();
    for id in reached(crates, metadata)? {
        let package = &metadata[id];
        let version = package.version.to_string();
        let purl = match &package.source {
            Some(source) if source.is_crates_io() => format!("pkg:cargo/{}@{version}", package.name),
            _ => String::new(),
        };
        let license = package.license.as_deref();
        components.insert(Component::new("library", &package.name, &version, purl, license));
    }
    Ok(Sbom {
        bom_format: "CycloneDX",
        spec_version: "1.6",
        version: 1,
        metadata: About { component: Component::new("container", name, version, String::new(), None) },
        components: components.into_iter().collect(),
    })
}

/// Copies the licences and notices of all crates from others, as these ask who passes their programs on to do, into a
/// directory for each.
///
/// # Errors
/// If one cannot be copied.
pub(crate) fn copy_licences(crates: &[String], metadata: &Metadata, to: &Path) -> Result<()> {
    for id in reached(crates, metadata)? {
        let package = &metadata[id];
        if package.source.is_none() {
            continue;
        }
        let from = package.manifest_path.parent().context("a manifest is in a directory")?;
        let into = to.join(format!("{}-{}", package.name, package.version));
        for entry in fs::read_dir(from).with_context(|| format!("cannot list {from}"))? {
            let path = entry?.path();
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            let is_one = NOTICES.iter().any(|begin| name.to_ascii_uppercase().starts_with(begin));
            if is_one && path.is_file() {
                fs::create_dir_all(&into)
                    .and_then(|()| fs::copy(&path, into.join(name)))
                    .with_context(|| format!("cannot copy {}", path.display()))?;
            }
        }
    }
    Ok(())
}

/// These crates and everything that ends in their programs: not what only builds or tests them.
fn reached<'a>(crates: &[String], metadata: &'a Metadata) -> Result<BTreeSet<&'a PackageId>> {
    let resolve = metadata.resolve.as_ref().context("cargo metadata was run with --no-deps")?;
    let nodes: BTreeMap<&PackageId, _> = resolve.nodes.iter().map(|node| (&node.id, node)).collect();
    let mut next = Vec::new();
    for name in crates {
        let package = metadata.workspace_packages().into_iter().find(|package| *package.name == *name);
        next.push(&package.with_context(|| format!("the workspace has no crate {name}"))?.id);
    }
    let mut reached = BTreeSet::new();
    while let Some(id) = next.pop() {
        if !reached.insert(id) {
            continue;
        }
        let ends_in_it = |kinds: &[cargo_metadata::DepKindInfo]| {
            kinds.iter().any(|kind| kind.kind == DependencyKind::Normal)
        };
        let dependencies = nodes.get(id).into_iter().flat_map(|node| &node.deps);
        next.extend(
            dependencies
                .filter(|dependency| ends_in_it(&dependency.dep_kinds))
                .map(|dependency| &dependency.pkg),
        );
    }
    Ok(reached)
}

#[cfg(test)]
mod tests {
    use super::*;
    use cargo_metadata::MetadataCommand;

    #[test]
    fn a_bill_has_what_ends_in_the_program_and_not_what_tests_it() {
        let metadata = MetadataCommand::new().manifest_path("Cargo.toml").exec().unwrap();
        let glibc = Component::of_purl("pkg:deb/debian/libc6@2.41-12?arch=amd64").unwrap();
        let sbom = of("example.org/a", "1", &["aliquot-image".to_owned()], &metadata, &[glibc]).unwrap();
        let names: Vec<&str> = sbom.components.iter().map(|component| component.name.as_str()).collect();
        for name in ["aliquot-image", "tar", "sha2", "libc6"] {
            assert!(names.contains(&name), "{name} in {names:?}");
        }
        assert!(!names.contains(&"tempfile"), "{names:?}");
        let tar = sbom.components.iter().find(|component| component.name == "tar").unwrap();
        assert!(tar.purl.starts_with("pkg:cargo/tar@0.4."), "{tar:?}");
        assert_eq!(tar.licenses[0].expression, "MIT OR Apache-2.0");
        let error = of("a", "1", &["nothing".to_owned()], &metadata, &[]).unwrap_err();
        assert_eq!(error.to_string(), "the workspace has no crate nothing");
    }

    #[test]
    fn licences_of_others_go_with_the_program() {
        let metadata = MetadataCommand::new().manifest_path("Cargo.toml").exec().unwrap();
        let dir = tempfile::tempdir().unwrap();
        copy_licences(&["aliquot-image".to_owned()], &metadata, dir.path()).unwrap();
        let tar = metadata.packages.iter().find(|package| *package.name == "tar").unwrap();
        assert!(dir.path().join(format!("tar-{}/LICENSE-MIT", tar.version)).is_file());
        assert!(!dir.path().join(format!("aliquot-image-{}", env!("CARGO_PKG_VERSION"))).exists());
    }

    #[test]
    fn a_package_url_without_a_version_is_refused() {
        assert!(Component::of_purl("pkg:deb/debian/libc6").is_err());
    }
}
