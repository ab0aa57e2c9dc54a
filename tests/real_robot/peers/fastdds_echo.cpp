// Answers every JointState with a JointTrajectory of one point, over Fast DDS, ROS 2's default middleware.
// usage: fastdds_echo DOMAIN
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fastdds/dds/domain/DomainParticipant.hpp>
#include <fastdds/dds/domain/DomainParticipantFactory.hpp>
#include <fastdds/dds/publisher/DataWriter.hpp>
#include <fastdds/dds/publisher/Publisher.hpp>
#include <fastdds/dds/subscriber/DataReader.hpp>
#include <fastdds/dds/subscriber/DataReaderListener.hpp>
#include <fastdds/dds/subscriber/SampleInfo.hpp>
#include <fastdds/dds/subscriber/Subscriber.hpp>
#include <thread>

#include "messagesPubSubTypes.h"

using namespace eprosima::fastdds::dds;
using State = sensor_msgs::msg::dds_::JointState_;
using Command = trajectory_msgs::msg::dds_::JointTrajectory_;
using Point = trajectory_msgs::msg::dds_::JointTrajectoryPoint_;

class Echo : public DataReaderListener {
 public:
  DataWriter *writer = nullptr;

  void on_data_available(DataReader *reader) override {
    State state;
    SampleInfo info;
    while (reader->take_next_sample(&state, &info) == ReturnCode_t::RETCODE_OK) {
      if (!info.valid_data) continue;
      Point point;
      point.positions(state.position());
      point.velocities(state.velocity());
      point.time_from_start().nanosec(20000000);
      Command command;
      command.header(state.header());
      command.joint_names(state.name());
      command.points().push_back(point);
      writer->write(&command);
    }
  }
};

int main(int count, char **arguments) {
  if (count != 2) return 2;
  DomainParticipant *participant =
      DomainParticipantFactory::get_instance()->create_participant(std::atoi(arguments[1]), PARTICIPANT_QOS_DEFAULT);
  if (participant == nullptr) return 1;
  TypeSupport states(new sensor_msgs::msg::dds_::JointState_PubSubType());
  TypeSupport commands(new trajectory_msgs::msg::dds_::JointTrajectory_PubSubType());
  states.register_type(participant);
  commands.register_type(participant);
  Topic *heard = participant->create_topic("rt/joint_states", states.get_type_name(), TOPIC_QOS_DEFAULT);
  Topic *said = participant->create_topic("rt/arm/joint_trajectory", commands.get_type_name(), TOPIC_QOS_DEFAULT);
  // The qualities of a ROS 2 node with default settings.
  DataWriterQos offered;
  offered.reliability().kind = RELIABLE_RELIABILITY_QOS;
  offered.durability().kind = VOLATILE_DURABILITY_QOS;
  offered.history().depth = 10;
  DataReaderQos asked;
  asked.reliability().kind = RELIABLE_RELIABILITY_QOS;
  asked.history().depth = 10;
  Echo echo;
  echo.writer = participant->create_publisher(PUBLISHER_QOS_DEFAULT)->create_datawriter(said, offered);
  participant->create_subscriber(SUBSCRIBER_QOS_DEFAULT)->create_datareader(heard, asked, &echo);
  std::printf("ready\n");
  std::fflush(stdout);
  for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
}
