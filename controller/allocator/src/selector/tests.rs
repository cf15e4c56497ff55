use super::*;
use crate::quantity::Quantity;
use rstest::rstest;

const DRIVER: &str = "gpu.aliquot.dev";

fn matches(expression: &str) -> Result<bool, SelectorError> {
    let text = |text: &str| AttributeValue::Text(text.into());
    let values = [
        ("gpu.aliquot.dev/type", text("mig")),
        ("gpu.aliquot.dev/profile", text("1g.10gb")),
        ("gpu.aliquot.dev/minor", AttributeValue::Int(3)),
        ("gpu.aliquot.dev/healthy", AttributeValue::Bool(true)),
        ("gpu.aliquot.dev/driverVersion", AttributeValue::Version("570.86.15".into())),
        ("resource.kubernetes.io/pcieRoot", text("pci0000:00")),
    ];
    let facts = DeviceFacts {
        driver: DRIVER,
        shareable: false,
        attributes: values.iter().map(|(name, value)| (*name, value)).collect(),
        capacities: vec![("gpu.aliquot.dev/memory", Quantity::from_u64(10 << 30))],
    };
    Selector::compile(expression).matches(&Environment::new(), &facts, &mut || false)
}

#[rstest]
#[case::driver(r#"device.driver == "gpu.aliquot.dev""#)]
#[case::attribute(r#"device.attributes["gpu.aliquot.dev"].type == "mig""#)]
#[case::index_instead_of_dot(r#"device.attributes["gpu.aliquot.dev"]["type"] == "mig""#)]
#[case::integer(r#"device.attributes["gpu.aliquot.dev"].minor in [1, 3]"#)]
#[case::boolean(r#"device.attributes["gpu.aliquot.dev"].healthy"#)]
#[case::version(r#"device.attributes["gpu.aliquot.dev"].driverVersion.isGreaterThan(semver("565.0.0"))"#)]
#[case::version_order(
    r#"device.attributes["gpu.aliquot.dev"].driverVersion.compareTo(semver("570.86.15")) == 0"#
)]
#[case::version_parts(r#"device.attributes["gpu.aliquot.dev"].driverVersion.major() == 570"#)]
#[case::quantity(r#"device.capacity["gpu.aliquot.dev"].memory.compareTo(quantity("10Gi")) >= 0"#)]
#[case::quantity_greater(r#"device.capacity["gpu.aliquot.dev"].memory.isGreaterThan(quantity("9999Mi"))"#)]
#[case::quantity_arithmetic(
    r#"device.capacity["gpu.aliquot.dev"].memory.sub(quantity("1Gi")).isLessThan(quantity("10Gi"))"#
)]
#[case::regular_expression(r#"device.attributes["gpu.aliquot.dev"].profile.matches("^1g[.]")"#)]
#[case::string_functions(r#"device.attributes["gpu.aliquot.dev"].profile.split(".")[0] == "1g""#)]
#[case::has(r#"has(device.attributes["gpu.aliquot.dev"].type)"#)]
#[case::has_not(r#"!has(device.attributes["gpu.aliquot.dev"].nothing)"#)]
#[case::unknown_domain_is_empty(r#"!has(device.attributes["other.example.com"].type)"#)]
#[case::unknown_domain_is_not_listed(r#"!("other.example.com" in device.attributes)"#)]
#[case::known_domain_is_listed(r#""gpu.aliquot.dev" in device.attributes"#)]
#[case::unknown_domain_of_capacity(r#"!has(device.capacity["other.example.com"].memory)"#)]
#[case::optional_selection(r#"device.attributes["gpu.aliquot.dev"].?type.orValue("") == "mig""#)]
#[case::optional_selection_missing(r#"device.attributes["gpu.aliquot.dev"].?nothing.orValue("x") == "x""#)]
#[case::optional_of_unknown_domain(r#"device.attributes["other.example.com"].?nothing.orValue(7) == 7"#)]
#[case::optional_index(r#"device.attributes["gpu.aliquot.dev"][?"type"].orValue("") == "mig""#)]
#[case::optional_domain(r#"device.attributes[?"other.example.com"].hasValue()"#)]
#[case::optional_chain(r#"device.attributes[?"gpu.aliquot.dev"].type.orValue("") == "mig""#)]
#[case::optional_chain_missing(r#"!device.attributes[?"gpu.aliquot.dev"].nothing.hasValue()"#)]
#[case::optional_map(r#"device.attributes["gpu.aliquot.dev"].?minor.optMap(m, m * 2).orValue(0) == 6"#)]
#[case::optional_map_missing(
    r#"device.attributes["gpu.aliquot.dev"].?nothing.optMap(m, m * 2).orValue(0) == 0"#
)]
#[case::optional_flat_map(
    r#"device.attributes["gpu.aliquot.dev"].?minor.optFlatMap(m, optional.of(m)).value() == 3"#
)]
#[case::bind_domain(
    r#"cel.bind(dra, device.attributes["gpu.aliquot.dev"], dra.type == "mig" && dra.minor == 3)"#
)]
#[case::bind_attributes(
    r#"cel.bind(a, device.attributes, has(a["gpu.aliquot.dev"].type) && !has(a["other"].x))"#
)]
#[case::bind_value(r#"cel.bind(m, device.attributes["gpu.aliquot.dev"].minor, m > 2 && m < 4)"#)]
#[case::bind_nested(r#"cel.bind(x, 1, cel.bind(x, x + 1, x == 2) && x == 1)"#)]
#[case::bind_shadowed_by_macro(r#"cel.bind(d, device.attributes, [1].all(d, d == 1))"#)]
#[case::exists(r#"["mig", "gpu"].exists(t, t == device.attributes["gpu.aliquot.dev"].type)"#)]
#[case::over_domains(r#"device.attributes.exists(domain, domain == "resource.kubernetes.io")"#)]
#[case::two_variables_of_a_map(
    r#"device.attributes["gpu.aliquot.dev"].exists(k, v, k == "type" && v == "mig")"#
)]
#[case::two_variables_of_a_list(r#"["a", "b"].all(i, v, (i == 0 && v == "a") || (i == 1 && v == "b"))"#)]
#[case::exists_one_of_two(r#"[1, 2, 3].existsOne(i, v, v == i + 1 && v == 2)"#)]
#[case::transform_list(r#"[1, 2].transformList(i, v, i + v) == [1, 3]"#)]
#[case::transform_list_filtered(r#"[1, 2, 3].transformList(i, v, v > 1, v) == [2, 3]"#)]
#[case::transform_map(r#"{"a": 1}.transformMap(k, v, v + 1) == {"a": 2}"#)]
#[case::transform_map_entry(r#"{"a": 1}.transformMapEntry(k, v, {v: k}) == {1: "a"}"#)]
#[case::sets(r#"sets.contains([1, 2, 3], [device.attributes["gpu.aliquot.dev"].minor])"#)]
#[case::includes(r#"device.attributes["gpu.aliquot.dev"].type.includes("mig")"#)]
#[case::includes_list(r#"[1, 2].includes(2)"#)]
#[case::dynamic(r#"dyn(device.attributes["gpu.aliquot.dev"].type) == "mig""#)]
#[case::types(r#"type(device.attributes["gpu.aliquot.dev"].minor) == int && type("") == string"#)]
#[case::mixed_types_differ(r#"device.attributes["gpu.aliquot.dev"].type != 5"#)]
#[case::error_absorbed_by_and(r#"!(device.attributes["gpu.aliquot.dev"].nothing == 1 && false)"#)]
#[case::error_absorbed_by_or(r#"device.attributes["gpu.aliquot.dev"].nothing == 1 || true"#)]
#[case::ternary(r#"has(device.attributes["gpu.aliquot.dev"].nothing) ? false : true"#)]
#[case::not_shareable("!device.allowMultipleAllocations")]
#[case::url(r#"isURL("https://example.com/x")"#)]
#[case::ip(r#"ip("10.0.0.1").family() == 4"#)]
#[case::cidr(r#"cidr("10.0.0.0/8").containsIP("10.1.2.3")"#)]
#[case::format(r#"!format.dns1123Label().validate("gpu-0").hasValue()"#)]
fn the_language_of_kubernetes_is_understood(#[case] expression: &str) {
    assert_eq!(matches(expression), Ok(true), "{expression}");
}

#[rstest]
#[case::missing_attribute(r#"device.attributes["gpu.aliquot.dev"].nothing == 1"#, "No such key: nothing")]
#[case::missing_capacity(
    r#"device.capacity["gpu.aliquot.dev"].nothing.isGreaterThan(quantity("1"))"#,
    "No such key: nothing"
)]
#[case::not_bool(r#"device.attributes["gpu.aliquot.dev"].type"#, "of type string, not bool")]
#[case::field_of_a_string(r#"device.attributes["gpu.aliquot.dev"].type.x == 1"#, "No such overload")]
#[case::unknown_field(r#"device.nothing == 1"#, "No such key: nothing")]
#[case::unknown_variable("pod.name == 'x'", "pod")]
#[case::bad_quantity(r#"quantity("10GiB").isGreaterThan(quantity("1"))"#, "10GiB")]
#[case::division_by_zero("7 / (1 - 1) == 0", "division by zero")]
#[case::division_by_zero_without_a_sign("7u / (1u - 1u) == 0u", "division by zero")]
#[case::remainder_by_zero("7 % (1 - 1) == 0", "modulus by zero")]
#[case::remainder_by_zero_without_a_sign("7u % (1u - 1u) == 0u", "modulus by zero")]
#[case::smallest_by_minus_one("-9223372036854775808 / -1 == 0", "overflow")]
#[case::below_zero_without_a_sign("1u - 2u == 0u", "overflow")]
#[case::too_large_a_product("9223372036854775807 * 2 == 0", "overflow")]
fn failures_name_the_expression_and_the_reason(#[case] expression: &str, #[case] reason: &str) {
    let error = matches(expression).expect_err("must fail");
    assert!(matches!(error, SelectorError::Runtime { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains(reason), "{text}");
    assert!(text.contains(&format!("{expression:?}")), "{text}");
}

#[rstest]
#[case::syntax("device.driver ==")]
#[case::message("google.protobuf.Struct{}")]
#[case::empty("")]
fn what_does_not_compile_says_so_for_every_device(#[case] expression: &str) {
    let error = matches(expression).expect_err("must fail");
    assert!(matches!(error, SelectorError::Compile { .. }), "{error}");
}

#[rstest]
#[case::string_not_closed("\"abc", "at 0: a string is not closed: \" is missing")]
#[case::string_over_two_lines("1 + 'a\nb'", "at 4: a string is not closed: ' is missing")]
#[case::backslash_at_the_end("'\\", "at 0: a string ends with a backslash")]
#[case::unknown_escape("'\\q'", "at 0: \\q is not an escape sequence")]
#[case::short_escape("'\\x1'", "at 0: an escape sequence has too few digits")]
#[case::surrogate("'\\ud800'", "at 0: an escape sequence is no character")]
#[case::large_number("99999999999999999999", "at 0: the number is too large")]
#[case::large_hexadecimal_number("0xfffffffffffffffff", "at 0: the number is too large")]
#[case::large_int("9223372036854775808", "the number is too large")]
#[case::name_not_closed("`a", "at 0: a '`' is missing")]
#[case::character("1 # 2", "at 2: unexpected character '#'")]
#[case::nothing("1 +", "Syntax error: an expression was expected, nothing was found")]
#[case::bracket("(1", "Syntax error: ) was expected, nothing was found")]
#[case::literal("1 2", "Syntax error: the end was expected, a literal was found")]
#[case::sign("a.(", "Syntax error: a name was expected, ( was found")]
#[case::name("1 a", "Syntax error: the end was expected, a was found")]
#[case::message("a{}", "messages are not supported")]
#[case::has("has(a)", "invalid argument to has() macro")]
#[case::macro_variable("[1].all(1, true)", "the first argument of a macro must be a simple name")]
#[case::bound_variable("cel.bind(1, 2, 3)", "the first argument of a macro must be a simple name")]
#[case::brackets(&"(".repeat(300), "it is nested deeper than 250 levels; simplify it")]
#[case::levels(&"1+".repeat(400), "it is nested deeper than 300 levels; split it into several selectors")]
#[case::length(&" ".repeat(10_241), "it is 10241 bytes long, the most is 10240")]
fn what_does_not_compile_says_why(#[case] expression: &str, #[case] reason: &str) {
    let text = matches(expression).expect_err("must fail").to_string();
    assert_eq!(text.split_once(" does not compile: ").map(|(_, reason)| reason), Some(reason));
}

#[rstest]
#[case(r#"device.driver == "x" && device.attributes["d.com"].a == 1"#, &["d.com/a"], false)]
#[case(r#"cel.bind(d, device.attributes["d.com"], d.a == d.?b.orValue(1) && has(d.c))"#, &["d.com/a", "d.com/b", "d.com/c"], false)]
#[case(r#"device.capacity["d.com"].memory.isGreaterThan(quantity("1"))"#, &[], true)]
#[case(r#"cel.bind(c, device.capacity, "d.com" in c && device.attributes["d.com"].a == 1)"#, &["d.com/a"], true)]
#[case(r#"cel.bind(c, device.capacity["d.com"], c.?memory.hasValue())"#, &[], true)]
#[case(r#"device.capacity["d.com"]["memory"].isGreaterThan(quantity("1"))"#, &[], true)]
#[case(r#"device.allowMultipleAllocations"#, &[], true)]
#[case(r#"device.attributes["d.com"]["a"] == 1"#, &["d.com/a"], false)]
fn only_what_is_read_is_listed(#[case] expression: &str, #[case] names: &[&str], #[case] shape: bool) {
    let names = names.iter().map(|name| (*name).to_owned()).collect();
    assert_eq!(Selector::compile(expression).reads(), &Reads::Names { names, shape });
}

#[rstest]
#[case(r#"device.attributes["d.com"].a == 1 && device.capacity["d.com"]["b"].isGreaterThan(quantity("1"))"#, &["d.com/a"], &["d.com/b"])]
#[case(r#"cel.bind(d, device.attributes["d.com"], d.a == d.?b.orValue(1) && has(d.c) && "e" in d)"#, &["d.com/a", "d.com/b", "d.com/c", "d.com/e"], &[])]
#[case(r#"device.attributes[?"d.com"].a.orValue(1) == 1 && device.capacity["e.com"].?b.hasValue()"#, &["d.com/a"], &["e.com/b"])]
#[case(r#"device.attributes.all(d, d != "x") && device.attributes["d.com"].a == 1"#, &["d.com/a"], &[])]
#[case(r#"device.attributes["d.com"][device.driver] == 1"#, &[], &[])]
fn attributes_and_capacities_are_told_by_name(
    #[case] expression: &str,
    #[case] attributes: &[&str],
    #[case] capacities: &[&str],
) {
    let named = Selector::compile(expression).named();
    let of = |field: Field| -> Vec<String> {
        let named = named.iter().filter(|named| named.field == field);
        named.map(|named| format!("{}/{}", named.domain, named.name)).collect()
    };
    assert_eq!(
        (of(Field::Attributes), of(Field::Capacity)),
        (
            attributes.iter().map(ToString::to_string).collect(),
            capacities.iter().map(ToString::to_string).collect(),
        )
    );
}

#[rstest]
#[case::only(r#"device.driver == "gpu.aliquot.dev" && device.capacity["x"].?y.hasValue()"#, true)]
#[case::one_of_two(r#"device.driver in ["gpu.aliquot.dev", "nic.example.com"]"#, false)]
#[case::other(r#"device.driver == "nic.example.com""#, false)]
#[case::any("true", false)]
#[case::broken("device.driver ==", false)]
fn whether_only_one_driver_is_demanded_is_known(#[case] expression: &str, #[case] demanded: bool) {
    assert_eq!(Selector::compile(expression).demands_driver(DRIVER), demanded);
}

#[rstest]
#[case(r#""d.com" in device.attributes"#)]
#[case(r#"device.attributes.all(d, d != "x")"#)]
#[case(r#"device.attributes["d.com"].all(k, k != "x")"#)]
#[case(r#"device.attributes["d.com"][device.driver] == 1"#)]
fn reading_the_whole_map_is_noticed(#[case] expression: &str) {
    assert_eq!(Selector::compile(expression).reads(), &Reads::Everything);
}

#[rstest]
#[case::own_driver(r#"device.driver == "gpu.aliquot.dev""#, true)]
#[case::other_driver(r#"device.driver == "nic.example.com""#, false)]
#[case::other_driver_with_attributes(
    r#"device.driver == "nic.example.com" && device.attributes["nic.example.com"].speed > 10"#,
    false
)]
#[case::own_attribute(r#"device.attributes["gpu.aliquot.dev"].type == "mig""#, true)]
#[case::own_attribute_optional(r#"device.attributes["gpu.aliquot.dev"].?type.orValue("") == "mig""#, true)]
#[case::other_domain_guarded(
    r#""nic.example.com" in device.attributes && device.attributes["nic.example.com"].speed > 10"#,
    false
)]
#[case::other_domain_optional(r#"device.attributes["nic.example.com"].?speed.orValue(0) > 10"#, false)]
#[case::other_domain_unguarded(r#"device.attributes["nic.example.com"].speed > 10"#, true)]
#[case::everything("true", true)]
#[case::nothing("false", false)]
#[case::shared_only("device.allowMultipleAllocations", true)]
#[case::negated(r#"!(device.driver == "gpu.aliquot.dev")"#, false)]
#[case::bound(r#"cel.bind(d, device.driver, d == "nic.example.com")"#, false)]
#[case::broken("device.driver ==", false)]
fn what_a_class_can_select_is_known_without_devices(#[case] expression: &str, #[case] possible: bool) {
    assert_eq!(Selector::compile(expression).may_select(DRIVER, &Environment::new()), possible);
}

proptest::proptest! {
    #[test]
    fn arbitrary_text_never_panics(text in "[a-z0-9.()\\[\\]?\"{}:,&|! =]{0,60}") {
        let _ = matches(&text);
    }
}

#[test]
fn an_error_about_a_long_expression_has_room_for_its_reason() {
    let long = format!("device.driver == \"{}\" &&", "é".repeat(4_000));
    let error = Selector::compile(&long).matches(&Environment::new(), &DeviceFacts::default(), &mut || false);
    let text = error.expect_err("it does not compile").to_string();
    assert!(text.len() < 1_000 && text.contains("does not compile: "), "{text}");
}
