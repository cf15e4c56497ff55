//! The time slice that a request's configuration asks for. A GPU has one time slice, so claims that ask for
//! different ones cannot share the GPU; the node would refuse the younger claim.

use aliquot_model::config::{self, Config, TimeSliceInterval};
use k8s_openapi::api::resource::v1::OpaqueDeviceConfiguration;

/// One entry of a configuration, with the requests that it names; an empty list stands for all requests.
pub type Entry<'a> = (Option<&'a OpaqueDeviceConfiguration>, &'a [String]);

/// Returns the time slice that the entries ask for a request (`request` or `request/subrequest`); `None` if
/// any interval will do. Later entries override earlier ones, as on the node.
pub fn asked<'a>(
    entries: impl Iterator<Item = Entry<'a>>,
    driver: &str,
    request: &str,
) -> Option<TimeSliceInterval> {
    let main = request.split_once('/').map_or(request, |(main, _)| main);
    let concerned =
        |names: &[String]| names.is_empty() || names.iter().any(|name| *name == request || *name == main);
    let configs = entries.filter(|(_, names)| concerned(names)).filter_map(|(opaque, _)| {
        let opaque = opaque.filter(|opaque| opaque.driver == driver)?;
        match config::decode_lenient(&opaque.parameters.0) {
            Ok(Config::Gpu(config)) => Some(config.time_slice),
            _ => None,
        }
    });
    configs.last().filter(|interval| *interval != TimeSliceInterval::Default)
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
    use rstest::rstest;
    use serde_json::json;

    fn entry(interval: &str) -> OpaqueDeviceConfiguration {
        let parameters =
            json!({"apiVersion": "aliquot.dev/v1alpha1", "kind": "GpuConfig", "timeSlice": interval});
        OpaqueDeviceConfiguration { driver: "d".into(), parameters: RawExtension(parameters) }
    }

    #[rstest]
    #[case::none(&[], None)]
    #[case::for_all(&[("Long", "")], Some(TimeSliceInterval::Long))]
    #[case::for_the_request(&[("Long", "r")], Some(TimeSliceInterval::Long))]
    #[case::for_the_subrequest(&[("Long", "r/s")], Some(TimeSliceInterval::Long))]
    #[case::for_another(&[("Long", "q"), ("Short", "r/t")], None)]
    #[case::the_last_one_counts(&[("Long", ""), ("Short", "r")], Some(TimeSliceInterval::Short))]
    #[case::the_drivers_default_is_no_wish(&[("Long", ""), ("Default", "r")], None)]
    fn a_request_asks_for_the_interval_of_its_configuration(
        #[case] entries: &[(&str, &str)],
        #[case] want: Option<TimeSliceInterval>,
    ) {
        let entries: Vec<_> = entries
            .iter()
            .map(|(interval, name)| {
                (entry(interval), Vec::from_iter((!name.is_empty()).then(|| (*name).to_owned())))
            })
            .collect();
        let of = |driver: &str| {
            let entries = entries.iter().map(|(opaque, names)| (Some(opaque), names.as_slice()));
            asked(entries, driver, "r/s")
        };
        assert_eq!(of("d"), want);
        assert_eq!(of("other"), None);
    }
}
