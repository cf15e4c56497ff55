//! `attributes.md`: what is published of devices, and names that objects have from us.

use super::chart::{CHART, classes};
use super::markdown::{Page, code, lines, phrase};
use super::{path, read};
use aliquot_kubelet_plugin::health::Xids;
use aliquot_kubelet_plugin::health::cause::Cause;
use aliquot_model::layout::{
    Fact, FactType, MAX_ATTRIBUTES_AND_CAPACITIES, MEMORY_SLICES, TaintEffect, attributes, capacities,
};
use aliquot_model::names::{DeviceTaint, KEYS, TAINTS};
use aliquot_model::{DeviceKind, DeviceName, Placement, ProfileName};
use std::collections::BTreeMap;
use std::fs;

/// All of it.
pub(super) fn page() -> String {
    let about = "What claims can ask for, and what objects of the cluster have from Aliquot or for it.\n\
                 Names are those with the driver's name `gpu.aliquot.dev` (value `driverName`).";
    let mut page = Page::new(
        "Devices, labels, annotations, taints",
        "the tables in model/src and the chart's DeviceClasses",
        about,
    );
    device_classes(&mut page);
    facts(&mut page);
    taints(&mut page);
    keys(&mut page);
    page.done()
}

fn device_classes(page: &mut Page) {
    page.heading(2, "Device classes");
    page.text(
        "A node publishes the devices of a GPU side by side, and those that cannot be held together take the same counters: \
         giving out one takes away the others. How to ask for each: [asking.md](../asking.md).",
    );
    let rows = classes().into_iter().map(|class| {
        let kind =
            DeviceKind::parse(&class.kind).unwrap_or_else(|| panic!("{} selects {}", class.name, class.kind));
        let value = class.value.map(|value| code(&value)).unwrap_or_default();
        let shared = if kind.shareable() { "several" } else { "one" };
        [
            code(&class.name),
            code(&class.kind),
            code(&example(kind)),
            shared.to_owned(),
            value,
            phrase(&class.about),
        ]
    });
    page.table(
        ["DeviceClass", "`type`", "device, such as", "claims", "switched on by", "what it gives"],
        rows.collect(),
    );
}

/// A device's name.
fn example(kind: DeviceKind) -> String {
    let (profile, at) = (ProfileName::new("1g.10gb"), Placement { start: 6, size: 1 });
    let name = match kind {
        DeviceKind::Mig => DeviceName::mig(0, &profile, 19, at),
        DeviceKind::MigShare => DeviceName::mig_share(0, &profile, 19, at),
        kind => DeviceName::Plain { minor: 0, kind },
    };
    name.to_string()
}

fn facts(page: &mut Page) {
    page.heading(2, "Attributes");
    page.text(&format!(
        "In CEL: `device.attributes[\"gpu.aliquot.dev\"].productName`, and of a standard one \
         `device.attributes[\"resource.kubernetes.io\"].numaNode`.\n\
         What the driver or the kernel does not tell is left out: ask with `has(…)` first.\n\
         Kubernetes takes {MAX_ATTRIBUTES_AND_CAPACITIES} attributes and capacities of a device; where there are more, \
         capacities of memory slices go first, then `index`, `minor` and `brand`."
    ));
    page.table(
        ["attribute", "value", "devices of type", "what it says"],
        table(|kind| attributes(kind).collect()),
    );
    page.heading(2, "Capacities");
    page.text("In CEL: `device.capacity[\"gpu.aliquot.dev\"].memory.compareTo(quantity(\"40Gi\")) >= 0`.");
    let of = |kind| {
        let slices = (kind == DeviceKind::Mig).then_some(&MEMORY_SLICES);
        capacities(kind).chain(slices).collect()
    };
    page.table(["capacity", "value", "devices of type", "what it says"], table(of));
}

/// Facts of all kinds, each once.
fn table(of: impl Fn(DeviceKind) -> Vec<&'static Fact>) -> Vec<[String; 4]> {
    let mut kinds: BTreeMap<(&str, &str), (&Fact, Vec<&str>)> = BTreeMap::new();
    for kind in DeviceKind::ALL {
        for fact in of(kind) {
            kinds.entry((fact.name, fact.about)).or_insert((fact, Vec::new())).1.push(kind.as_str());
        }
    }
    let rows = kinds.into_values().map(|(fact, kinds)| {
        let form = match fact.form {
            FactType::Text => "text",
            FactType::Int => "integer",
            FactType::Version => "version",
            FactType::Bool => "boolean",
            FactType::Quantity => "quantity",
        };
        let all = kinds.len() == DeviceKind::ALL.len();
        let kinds = if all {
            "all".to_owned()
        } else {
            kinds.iter().map(|kind| code(kind)).collect::<Vec<_>>().join(", ")
        };
        [code(fact.name), form.to_owned(), kinds, phrase(fact.about)]
    });
    rows.collect()
}

fn taints(page: &mut Page) {
    page.heading(2, "Taints of devices");
    page.text(
        "Keys begin with the driver's name: `gpu.aliquot.dev/held`. A claim that tolerates `cordoned`, or a taint for the \
         health of a GPU, is given the device all the same; one that tolerates a reserved one is refused.",
    );
    let reserved = |taint: &DeviceTaint| if taint.is_reserved { "yes" } else { "no" };
    let rows = TAINTS.iter().map(|taint| {
        [code(taint.what), phrase(taint.effect), reserved(taint).to_owned(), phrase(taint.about)]
    });
    page.table(["taint", "effect", "reserved", "what it means"], rows.collect());
    page.text(
        "For the [health](../health.md) of a GPU, on all of its devices but the one for administration:",
    );
    const SOME: u64 = 79;
    let causes = [Cause::Lost, Cause::Xid(SOME), Cause::Ecc, Cause::RowRemapFailure, Cause::RowRemapPending];
    let rest = [Cause::Stuck, Cause::Unreadable, Cause::NoDriver, Cause::NoEvents];
    let recoveries = (1..=4).map(Cause::Recovery);
    let rows = causes.into_iter().chain(recoveries).chain(rest).map(|cause| {
        let taint = cause.taint("", &Xids::default()).expect("a taint");
        let number = |text: &str| text.replace(&SOME.to_string(), "<number>");
        let value = if taint.value.is_empty() { String::new() } else { format!("={}", number(&taint.value)) };
        let effect = match cause {
            Cause::Xid(_) => "[by number](../health.md#xids)".to_owned(),
            _ => taint.effect.as_str().to_owned(),
        };
        let about = match cause {
            Cause::Xid(_) => "the driver reported an error by number".to_owned(),
            other => other.text(),
        };
        [
            code(&format!("{}{value}", taint.key.trim_start_matches('/'))),
            effect,
            phrase(&about),
            phrase(cause.end()),
        ]
    });
    page.table(["taint", "effect", "what is the matter", "what ends it"], rows.collect());
    let none = TaintEffect::None.as_str();
    page.text(&format!("`{none}` informs, and keeps no claim off; Kubernetes 1.34 does not have it, and such taints are left out there."));
}

fn keys(page: &mut Page) {
    page.heading(2, "Labels, annotations, scheduling gates");
    let parts = [
        ("Written by users", &["users"][..]),
        ("Written by administrators", &["administrators"]),
        ("Written by the programs", &["the webhook", "the controller", "the node agent"]),
    ];
    for (title, writers) in parts {
        page.heading(3, title);
        let several = writers.len() > 1;
        let keys = KEYS.iter().filter(|key| writers.contains(&key.by));
        let rows = keys.map(|key| {
            let rest = if key.name.ends_with('/') { "<GPU UUID>" } else { "" };
            let by = if several { key.by.trim_start_matches("the ") } else { "" };
            let name = code(&format!("{}{rest}", key.name));
            [name, key.form.as_str().to_owned(), key.of.to_owned(), by.to_owned(), phrase(&lines(key.about))]
        });
        page.table(["name", "what it is", "of", "by", "what it means"], rows.collect());
    }
}

#[test]
fn every_kind_of_device_has_one_class() {
    let kinds: Vec<String> = classes().into_iter().map(|class| class.kind).collect();
    for kind in DeviceKind::ALL {
        assert_eq!(kinds.iter().filter(|other| *other == kind.as_str()).count(), 1, "{kind}");
    }
}

/// Names in the chart that are no label and no annotation.
const OTHERS: [&str; 3] = ["aliquot.dev/aliquot", "aliquot.dev/v1alpha1", "gpu.aliquot.dev/mps"];

#[test]
fn every_name_of_ours_in_the_chart_is_listed() {
    let mut seen = 0;
    for file in fs::read_dir(path(&format!("{CHART}/templates"))).expect("templates") {
        let name = file.expect("a file").file_name().into_string().expect("a name");
        let text = read(&format!("{CHART}/templates/{name}"));
        let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '/');
        let words = text.split(|c| !is_part(c)).map(|word| word.trim_end_matches(['.', '/']));
        let ours = words.filter(|word| word.contains("aliquot.dev/") && !word.contains("//"));
        for word in ours.filter(|word| !word.starts_with('/') && !OTHERS.contains(word)) {
            seen += 1;
            let listed = KEYS.iter().any(|key| key.name.trim_end_matches('/') == word);
            assert!(listed, "{name} has {word}, which model/src/names/keys.rs does not");
        }
    }
    assert!(seen > 20, "{seen} names");
}
