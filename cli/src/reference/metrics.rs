//! `metrics.md`: metrics, from what the programs serve.

use super::markdown::{Page, code, phrase};

/// A family of metrics.
struct Family {
    name: String,
    kind: String,
    labels: Vec<String>,
    help: String,
}

/// All of it.
pub(super) fn page() -> String {
    let about = "Metrics that controllers and node agents serve. How they are scraped, and which of them are worth an alert: \
                 [metrics.md](../metrics.md).\n\
                 Families without any series are not in what is served.";
    let mut page = Page::new("Metrics", "the programs' registries", about);
    page.heading(2, "Controller");
    page.text("With those of the webhook, which the controller serves.");
    tell(&mut page, &aliquot_controller::metrics::Metrics::sample().text());
    page.heading(2, "Node agent");
    tell(&mut page, &aliquot_kubelet_plugin::metrics::Metrics::sample().encode().expect("text"));
    page.done()
}

fn tell(page: &mut Page, text: &str) {
    let mut families = families(text);
    families.sort_by(|a, b| a.name.cmp(&b.name));
    let rows = families
        .into_iter()
        .map(|family| [code(&family.name), family.kind, family.labels.join(", "), phrase(&family.help)]);
    page.table(["metric", "type", "labels", "what it says"], rows.collect());
}

/// Families of a text in the OpenMetrics format.
fn families(text: &str) -> Vec<Family> {
    let mut families: Vec<Family> = Vec::new();
    for line in text.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            let (name, help) = (name.to_owned(), help.to_owned());
            families.push(Family { name, kind: String::new(), labels: Vec::new(), help });
            continue;
        }
        let Some(family) = families.last_mut() else { continue };
        if let Some((_, kind)) = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')) {
            family.kind = kind.to_owned();
            // As it is served; of a histogram it is three names.
            if kind == "counter" {
                family.name.push_str("_total");
            }
        } else if !line.starts_with('#') && family.labels.is_empty() {
            let labels = line.split_once('{').and_then(|(_, rest)| rest.split_once('}'));
            let names = labels.into_iter().flat_map(|(labels, _)| labels.split(','));
            let names = names.filter_map(|label| label.split_once('=')).map(|(name, _)| name);
            family.labels = names.filter(|name| *name != "le").map(str::to_owned).collect();
        }
    }
    families
}

/// The guide names what is worth a word, and nothing that is not there.
#[test]
fn every_metric_that_the_guide_names_exists() {
    let page = page();
    let guide = super::read("docs/metrics.md");
    let named = guide.split('`').skip(1).step_by(2);
    let named = named.filter(|name| name.starts_with("dra_gpu_") || name.starts_with("aliquot_controller_"));
    let mut seen = 0;
    for name in named {
        seen += 1;
        assert!(page.contains(&format!("| `{name}` |")), "docs/metrics.md names {name}");
    }
    assert!(seen > 30, "{seen} metrics in docs/metrics.md");
}
