// The choice of a network interface, and endpoints as text.
#include <algorithm>
#include <string>
#include <vector>

#include "check.hpp"
#include "transport/network_interface.hpp"
#include "transport/tcp/links.hpp"

using namespace moecomm;
using namespace moecomm::tcp;
using test::throws;

namespace {

TEST(interfaces) {
  const InterfaceAddress docker0{"docker0", "172.17.0.1", true, false, false};
  CHECK(choose_address("", {docker0, {"eth0", "fd00::1"}}, "") == "fd00::1");
  CHECK(choose_address("", {docker0, {"lo", "127.0.0.1", true, true}}, "") == "172.17.0.1");
  const InterfaceAddress lo{"lo", "127.0.0.1", true, true}, lo6{"lo", "::1", true, true};
  const InterfaceAddress eth0{"eth0", "10.0.0.3", true, false}, eth1{"eth1", "192.168.0.3", true, false};
  const InterfaceAddress eth1_6{"eth1", "2001:db8::3", true, false}, eth2{"eth2", "10.1.0.3", false, false};
  const InterfaceAddress ib0{"ib0", "2001:db8:1::4", true, false};
  const std::vector<InterfaceAddress> host{lo, lo6, eth0, eth1_6, eth1, eth2, ib0};
  CHECK(choose_address("", host, "192.168.0.3") == "192.168.0.3");
  CHECK(choose_address("", host, "2001:db8:1::4") == "2001:db8:1::4");
  CHECK(choose_address("", host, "") == "10.0.0.3");
  CHECK(choose_address("", host, "10.1.0.3") == "10.0.0.3");  // it is down
  CHECK(choose_address("", host, "10.9.9.9") == "10.0.0.3");
  CHECK(choose_address("", {lo6, lo}, "") == "127.0.0.1");
  CHECK(choose_address("", {lo6, lo, ib0}, "") == "2001:db8:1::4");
  CHECK(choose_address("", {lo6}, "") == "::1");
  CHECK(choose_address("eth1", host, "10.0.0.3") == "192.168.0.3");
  CHECK(choose_address("ib0", host, "10.0.0.3") == "2001:db8:1::4");
  CHECK(choose_address("lo", host, "10.0.0.3") == "127.0.0.1");
  CHECK(choose_address("192.168.0.3", host, "10.0.0.3") == "192.168.0.3");
  CHECK(choose_address("2001:db8:0::0003", host, "10.0.0.3") == "2001:db8::3");
  CHECK(choose_address("127.0.0.9", host, "10.0.0.3") == "127.0.0.9");
  const auto refused = [&](const std::string& wanted, const std::vector<InterfaceAddress>& have,
                           const std::string& part) {
    return throws(ErrorKind::invalid_argument, part, [&] { choose_address(wanted, have, "10.0.0.3"); });
  };
  CHECK(refused("eth9", host, "'eth9'"));
  CHECK(refused("eth9", host, "eth0 (10.0.0.3)"));
  CHECK(refused("eth9", host, "eth2 (10.1.0.3, down)"));
  CHECK(refused("eth2", host, "it is down"));
  CHECK(refused("10.1.0.3", host, "eth2 is down"));
  CHECK(refused("10.9.9.9", host, "does not have that address"));
  CHECK(refused("node7.cluster", host, "none of that name"));
  CHECK(refused("0.0.0.0", host, "stands for all interfaces"));
  CHECK(refused("::", host, "stands for all interfaces"));
  CHECK(refused("", {}, "none at all"));
  CHECK(refused("", {eth2}, "none is up"));

  CHECK(interface_address("lo") == "127.0.0.1");
  CHECK(interface_address("127.0.0.1") == "127.0.0.1");
  const std::string own = interface_address(""), by_default = default_route_address();
  CHECK(by_default.empty() || own == by_default);
  const std::vector<InterfaceAddress> found = host_addresses();
  CHECK(std::any_of(found.begin(), found.end(), [&](const auto& each) { return each.address == own; }));
  CHECK(interface_address(own) == own);
}

TEST(addresses) {
  for (const std::string text : {"127.0.0.1:1", "10.0.0.3:65535", "[::1]:80", "[2001:db8::3]:4567"})
    CHECK(endpoint_text(parse_endpoint("it", text)) == text);
  for (const std::string text : {"", ":", ":80", "127.0.0.1", "127.0.0.1:80 ", "127.0.0.1:8o", "localhost:80",
                                 "[::1]80", "[]:80", "[::1:80"})
    CHECK(throws(ErrorKind::invalid_argument, "'" + text + "'",
                 [&] { parse_endpoint("endpoint of peer 3", text); }));
  CHECK(throws(ErrorKind::invalid_argument, "endpoint of peer 3",
               [] { parse_endpoint("endpoint of peer 3", "no"); }));
}

}  // namespace

int main() { return moecomm::test::run(); }
